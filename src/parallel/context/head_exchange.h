// SPDX-License-Identifier: Apache-2.0
// The two all-to-alls of cp_comm_type a2a (Ulysses): n neighbouring ranks trade "some tokens of all heads" for "all
// their tokens of some heads", and back. Member i keeps query heads [i A/n, (i+1) A/n) and the key/value heads that
// these read: K/n of them, or one, shared with n/K - 1 other members, where n exceeds K.
//
// Local tensors are (B, s, heads, D); exchanged ones (B, n s, heads, D), the members' tokens together in ascending row
// position, as merge_ranks() lays them out.
//
// Source: Jacobs et al., DeepSpeed Ulysses (2023). Shared key/value heads: this project.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "parallel/context/block_attention.h"

namespace farspan {

class HeadExchange {
 public:
  // `group`: the members, in rank order; they are ranks first_rank, first_rank + 1, ... of `layouts`.
  HeadExchange(Device& device, Arena& arena, Communicator& group, std::span<const RowLayout> layouts, int first_rank,
               const ContextAttentionShape& shape);

  int64_t heads() const { return shape_.heads / members(); }  // A / n
  int64_t kv_heads() const;                                   // K / n, or 1
  bool shares_kv_heads() const { return shape_.kv_heads % members() != 0; }
  Span heads_of(int member) const { return {member * heads(), (member + 1) * heads()}; }
  Span kv_heads_of(int member) const;
  int64_t tokens() const { return members() * layouts_[0].local_length(); }  // n s
  int member() const { return group_.rank(); }

  // Heads that travel together, side by side: x (B, s, H, D), of which member i gets heads of(i).
  struct Part {
    Tensor x;
    Span (HeadExchange::*of)(int member) const;
  };
  // (B, n s, W, D) in the dtype of the parts: this member's heads of every part, side by side.
  Buffer to_heads(std::string_view label, std::span<const Part> parts) const;
  // The same for numbers per head and token (log-sum-exp, delta): x (B, A, s) f32 -> (B, A/n, n s) f32, several at
  // once.
  std::vector<Buffer> scalars_to_heads(std::string_view label, std::span<const Tensor> x) const;

  // x (B, n s, A/n, D) of this member's query heads -> y (B, s, A, D); rounded to y's dtype before it travels.
  void heads_to_tokens(std::string_view label, const Tensor& x, Tensor y) const;
  // lse (B, A/n, n s) f32 -> (B, A, s).
  void scalars_to_tokens(std::string_view label, const Tensor& x, Tensor y) const;
  // Sums of what each member holds: d (B, n s, 2 K', D) f32, gradients of this member's keys, then values -> d_key,
  // d_value (B, s, K, D). Shared heads travel in fp32 and are summed in member order, then rounded once; others are
  // rounded before they travel.
  void key_gradients_to_tokens(std::string_view label, const Tensor& d, Tensor d_key, Tensor d_value) const;

 private:
  // Consecutive tokens of one member, in its own memory and among all members' tokens.
  struct TokenRun {
    int64_t row;
    int64_t local_begin;
    int64_t whole_begin;
    int64_t length;
  };
  int members() const { return group_.size(); }
  int64_t rows() const { return std::ssize(layouts_); }
  // What every member has for this one after each sent (n, ...) of `send` to its member.
  Buffer trade(std::string_view label, Buffer send) const;
  // Every member's tokens (its slice of B rows) from `x`, packed for it: (n, B, s, W, D) of `wire`.
  Buffer tokens_for_members(const Tensor& x, DType wire) const;

  Device& device_;
  Arena& arena_;
  Communicator& group_;
  std::span<const RowLayout> layouts_;
  ContextAttentionShape shape_;
  std::vector<std::vector<TokenRun>> runs_;  // by member
};

}  // namespace farspan
