// SPDX-License-Identifier: Apache-2.0
// Which calls of cuDNN make up a block.
//
// A block that is one plain or causal rectangle takes calls of its exact lengths. A long causal one is cut into rows of
// kRowTokens queries, each a causal call on the diagonal and a plain one for all keys before: on an H200 at 131072
// tokens of 16:8 heads of 128, sustained, backward runs at 544 TFLOP/s instead of 532 in half the workspace, and
// forward, where cuDNN takes such rows at all (attention_choice.h), at 614 instead of 581. Gradients of a causal
// rectangle whose queries see more keys before their own take two calls likewise: cuDNN's own mask for that shape is
// slower. Anything else takes batches of documents, at most kMostDocuments of like length each (forward that writes
// results once; the rest is left to the own kernels).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/attention.h"
#include "ops/attention_parts.h"
#include "ops/cuda/document_tables.h"
#include "ops/cudnn/attention_graph.h"
#include "ops/pass.h"

namespace farspan::cuda {

// One call on a rectangle of the block.
struct RectangleCall {
  Document rectangle;
  Diagonal diagonal = Diagonal::none;
  bool adds_to_queries = false;  // an earlier call has results for the same queries
  bool adds_to_keys = false;
};

// One call on several documents.
struct DocumentsCall {
  int64_t queries = 0;  // of each document at most
  int64_t keys = 0;
  int64_t entries = 0;  // of the tables: one for each document, and some that are empty
  std::vector<Document> documents;
};

struct BlockPlan {
  std::string refusal;  // why there is none
  // One or the other: rectangles that cover the block, or documents.
  std::vector<RectangleCall> rectangles;
  std::vector<DocumentsCall> documents;
  Diagonal diagonal = Diagonal::none;  // of the documents
  bool covers_queries = true;          // every query is in a document
};

BlockPlan plan_block(const AttentionBlock& block, Pass pass);

}  // namespace farspan::cuda
