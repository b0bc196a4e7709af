// Tokens from rows of logits: the most likely one, or one drawn from the row's own probabilities.
// Slow twin: `engine/draws.py`.
//
// Legend: R requests, N tokens to choose in all, V' draft vocabulary.
#pragma once

#include "common.h"

namespace dspark {

// The largest of the logits looked at so far, and the first column that has it.
struct Best {
  float logit = -INFINITY;
  int32_t column = 0;

  void meet(const Best& other) {
    if (other.logit > logit || (other.logit == logit && other.column < column)) *this = other;
  }
};

// columns: the columns first …, those before them having been looked at.
inline void look_at(Best& best, const float* logits, int columns, int first) {
  float top = -INFINITY;
#pragma omp simd reduction(max : top)
  for (int c = 0; c < columns; ++c) top = std::max(top, logits[c]);
  if (!(top > best.logit)) return;
  int c = 0;
  while (logits[c] != top) ++c;
  best = {top, first + c};
}

// Logits become softmax(logits / temperature).
inline void to_probabilities(float* row, int64_t columns, float temperature) {
  float top = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : top)
  for (int64_t c = 0; c < columns; ++c) {
    row[c] /= temperature;
    top = std::max(top, row[c]);
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < columns; ++c) {
    row[c] = exponential(row[c] - top);
    sum += row[c];
  }
  const float scale = 1.0f / sum;
#pragma omp simd
  for (int64_t c = 0; c < columns; ++c) row[c] *= scale;
}

// The column at which the sum of the weights passes `uniform` of their total; uniform in [0, 1). Part by part, so that
// most of the sum is formed several columns at once.
inline int64_t invert(const float* weights, int64_t columns, double uniform) {
  constexpr int64_t PART = 256;
  static thread_local std::vector<double> sums;
  sums.assign((columns + PART - 1) / PART, 0.0);
  double total = 0.0;
  for (int64_t part = 0; part < int64_t(sums.size()); ++part) {
    double sum = 0.0;
    const int64_t stop = std::min(columns, (part + 1) * PART);
#pragma omp simd reduction(+ : sum)
    for (int64_t c = part * PART; c < stop; ++c) sum += double(weights[c]);
    total += sums[part] = sum;
  }
  const double goal = uniform * total;
  double passed = 0.0;
  for (int64_t part = 0; part < int64_t(sums.size()); ++part) {
    if (passed + sums[part] <= goal) {
      passed += sums[part];
      continue;
    }
    const int64_t stop = std::min(columns, (part + 1) * PART);
    for (int64_t c = part * PART; c < stop; ++c) {
      passed += double(weights[c]);
      if (passed > goal) return c;
    }
  }
  int64_t last = columns - 1;  // rounding must not step past the last column that has weight
  while (last > 0 && !(weights[last] > 0.0f)) --last;
  return last;
}

// What the tokens of requests are chosen by and where they go; mirrored by `native.Choice`.
struct Choice {
  const int32_t* lengths;        // [R] tokens to choose of each
  const float* temperatures;     // [R] 0: the most likely token
  const float* uniforms;         // [N] what tokens are drawn with
  const int64_t* d2t;            // [V']
  int64_t *columns, *token_ids;  // [N] draft ids and target ids
  float* probs;                  // [N of the requests with a temperature, V'] what they were drawn from
  int64_t num_ids;               // V'
};

// The tokens of a round, slot by slot. All threads look at parts of a slot's logits; then any of them settles it.
class Choices {
 public:
  Choices(const Choice& choice, int num_requests, int num_threads)
      : choice_(choice), num_requests_(num_requests), first_{0}, first_probs_{0},
        bests_(size_t(num_threads) * num_requests) {
    for (int r = 0; r < num_requests; ++r) {
      num_slots_ = std::max(num_slots_, choice.lengths[r]);
      first_.push_back(first_[r] + choice.lengths[r]);
      first_probs_.push_back(first_probs_[r] + (choice.temperatures[r] > 0.0f ? choice.lengths[r] : 0));
    }
  }

  int num_slots() const { return num_slots_; }
  int64_t num_tokens() const { return first_.back(); }
  int64_t token(int32_t r, int slot) const { return first_[r] + slot; }  // its place among all
  bool has(int32_t r, int slot) const { return slot < choice_.lengths[r]; }

  // A thread starts on another slot.
  void forget(int thread) { std::fill_n(bests_.begin() + int64_t(thread) * num_requests_, num_requests_, Best{}); }

  // Looks at logits of the columns first …, which fill(logits) writes: up to PART at once, columns in order.
  template <class Fill>
  void look(int thread, int32_t r, int slot, int first, int columns, Fill fill) {
    float part[PART];
    const bool is_drawn = choice_.temperatures[r] > 0.0f;
    float* logits = is_drawn ? probs_of(r, slot) + first : part;
    fill(logits);
    if (!is_drawn) look_at(bests_[int64_t(thread) * num_requests_ + r], logits, columns, first);
  }

  // The target id of a token, the threads first … stop - 1 having looked at all of its logits.
  int64_t settle(int32_t r, int slot, int first, int stop) {
    Best best;
    for (int t = first; t < stop; ++t) best.meet(bests_[int64_t(t) * num_requests_ + r]);
    int64_t column = best.column;
    if (choice_.temperatures[r] > 0.0f) {
      float* row = probs_of(r, slot);
      to_probabilities(row, choice_.num_ids, choice_.temperatures[r]);
      column = invert(row, choice_.num_ids, double(choice_.uniforms[token(r, slot)]));
    }
    choice_.columns[token(r, slot)] = column;
    return choice_.token_ids[token(r, slot)] = choice_.d2t[column];
  }

  static constexpr int PART = 512;

 private:
  float* probs_of(int32_t r, int slot) const { return choice_.probs + (first_probs_[r] + slot) * choice_.num_ids; }

  const Choice& choice_;
  const int64_t num_requests_;
  int num_slots_ = 0;
  std::vector<int64_t> first_, first_probs_;  // [R + 1] of a request's tokens; of its rows of probabilities
  std::vector<Best> bests_;                   // [threads, R]
};

}  // namespace dspark
