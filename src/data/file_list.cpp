// SPDX-License-Identifier: Apache-2.0
#include "data/file_list.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>

#include "base/error.h"

namespace farspan {
namespace {

namespace fs = std::filesystem;

class Lister {
 public:
  void add(const std::string& given) {
    std::error_code failure;
    const fs::file_status status = fs::status(given, failure);
    if (status.type() == fs::file_type::not_found)
      throw DataError(fmt::format("data.path: '{}' does not exist; give a file or a folder", given));
    if (failure) throw DataError(fmt::format("data.path: cannot read '{}': {}", given, failure.message()));
    if (fs::is_directory(status))
      add_folder(given);
    else if (fs::is_regular_file(status))
      add_named_file(given);
    else
      throw DataError(fmt::format("data.path: '{}' is neither a file nor a folder", given));
  }

  FileList take() { return std::move(list_); }

 private:
  void add_named_file(const std::string& given) {
    if (listed_.insert(canonical(given)).second)
      list_.files.push_back({given, fs::path(given).filename().generic_string(), false});
    else
      list_.notes.push_back(fmt::format("data.path: '{}' is listed already and counts once", given));
  }

  void add_folder(const fs::path& root) {
    const size_t first = list_.files.size();
    links_.clear();
    bool any = walk(root, root);
    // Links come after all that is there itself, whatever their names; a link to a folder may bring further links.
    for (size_t i = 0; i < links_.size(); ++i) any = follow(fs::path(links_[i]), root) || any;
    if (!any)
      throw DataError(fmt::format("data.path: folder '{}' holds no file; hidden files do not count", root.string()));
    if (list_.files.size() == first)
      list_.notes.push_back(
          fmt::format("data.path: every file of '{}' is listed already and counts once", root.string()));
    std::sort(list_.files.begin() + static_cast<std::ptrdiff_t>(first), list_.files.end(),
              [](const ListedFile& a, const ListedFile& b) { return a.name < b.name; });
  }

  // Lists what lies in `folder` itself, remembers links; true when there was any file.
  bool walk(const fs::path& folder, const fs::path& root) {
    if (!walked_.insert(canonical(folder)).second) return true;
    std::error_code failure;
    fs::directory_iterator entries(folder, failure);
    if (failure)
      throw DataError(fmt::format("data.path: cannot read folder '{}': {}", folder.string(), failure.message()));
    std::vector<fs::path> children;
    for (const fs::directory_entry& entry : entries) children.push_back(entry.path());
    std::sort(children.begin(), children.end());

    bool any = false;
    for (const fs::path& child : children) {
      if (child.filename().string().starts_with('.')) continue;
      const fs::file_type type = fs::symlink_status(child).type();
      if (type == fs::file_type::symlink)
        links_.push_back(child.string());
      else if (type == fs::file_type::directory)
        any = walk(child, root) || any;
      else if (type == fs::file_type::regular)
        any = add_found_file(child, root) || any;
    }
    return any;
  }

  bool follow(const fs::path& link, const fs::path& root) {
    std::error_code failure;
    const fs::file_status status = fs::status(link, failure);
    if (fs::is_directory(status)) return walk(link, root);
    if (fs::is_regular_file(status)) return add_found_file(link, root);
    if (!fs::exists(status))
      throw DataError(fmt::format("data.path: link '{}' leads nowhere; repair or remove it", link.string()));
    return false;
  }

  bool add_found_file(const fs::path& file, const fs::path& root) {
    if (listed_.insert(canonical(file)).second) {
      const fs::path base =
          fs::absolute(root).lexically_normal() / "";  // with a slash at the end, so parent is the folder
      const std::string folder = base.parent_path().filename().generic_string();
      list_.files.push_back({file.string(), (fs::path(folder) / file.lexically_relative(root)).generic_string(), true});
    }
    return true;
  }

  static std::string canonical(const fs::path& path) {
    std::error_code failure;
    const fs::path result = fs::canonical(path, failure);
    if (failure) throw DataError(fmt::format("data.path: cannot read '{}': {}", path.string(), failure.message()));
    return result.string();
  }

  FileList list_;
  std::set<std::string> listed_;  // canonical paths
  std::set<std::string> walked_;  // canonical paths of folders
  std::vector<std::string> links_;
};

}  // namespace

FileList list_files(std::span<const std::string> paths) {
  if (paths.empty()) throw DataError("data.path is empty; give a file, a folder or a list of them");
  Lister lister;
  for (const std::string& path : paths) {
    if (path.empty()) throw DataError("data.path holds an empty name; give a file, a folder or a list of them");
    lister.add(path);
  }
  return lister.take();
}

}  // namespace farspan
