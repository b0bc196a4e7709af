// One token of a row of logits: the most likely one, or one drawn from the row's own probabilities.
// Slow twin: `engine/draws.py`.
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

}  // namespace dspark
