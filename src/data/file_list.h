// SPDX-License-Identifier: Apache-2.0
// Which files a list of paths stands for. A file stands for itself; a folder for the regular files below it whose
// names, and whose folders' names, do not begin with a dot, in byte order of their relative paths. Every file counts
// once: a symbolic link to a file that is listed anyway is passed over, as is a file named a second time.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace farspan {

struct ListedFile {
  std::string path;        // to open and to show
  std::string name;        // relative to the folder that holds the given path: the same wherever the data lies
  bool in_folder = false;  // found in a folder, not named itself
};

struct FileList {
  std::vector<ListedFile> files;
  std::vector<std::string> notes;  // files named twice, one line each
};

// Throws DataError for no path, a path that does not exist or cannot be read, a link that leads nowhere, a folder
// without a file to list, and a path that is neither file nor folder.
FileList list_files(std::span<const std::string> paths);

}  // namespace farspan
