// The two searches of the scheduler in microseconds. Slow twins: `allocate` and `choose_drafting` in
// dspark/speculation/prefix_scheduler.py, where the rules are explained; here they are only carried out.
#pragma once

#include "common.h"

namespace dspark {

// A step up for decision; mirrored by `native.Schedule`.
struct Schedule {
  int32_t num_requests, prefill_tokens;
  const double* survival;   // all rows, one behind the other
  const int32_t* offsets;   // [R + 1] where a request's row begins
  const int32_t* fixed;     // [R] a length that is not up for decision, or -1
  const double* weights;    // [R] what a token of a request counts; may be null
  const double* verify_s;   // [n] seconds of a step over 0, 1, ... tokens, as if there were no buckets
  const int32_t* padded;    // [n] tokens that are computed for so many
  double others_s;          // what the requests beside the first add to a step
};

constexpr double ROUNDING = 1e-6;  // as in prefix_scheduler.py

// Whether every row is a cumulative product, and every fixed length one that its row has.
inline bool is_sound(const Schedule& step) {
  for (int r = 0; r < step.num_requests; ++r) {
    const int width = step.offsets[r + 1] - step.offsets[r];
    if (step.fixed[r] > width) return false;
    double falling = 1.0;
    for (int k = 0; k < width; ++k) {
      const double value = step.survival[step.offsets[r] + k];
      if (!(value >= 0.0 && value <= 1.0 && value <= falling + ROUNDING)) return false;
      falling = std::min(falling, value);
    }
  }
  return true;
}

struct Slot {
  double survival;  // times weight
  int32_t place, request;
};

// What is known of a step before anything is decided.
struct Ranking {
  int64_t tokens;           // with the fixed lengths alone
  double tau;               // what these yield
  int64_t num_fixed = 0;
  std::vector<Slot> slots;  // up for decision, in the order of admission
};

inline Ranking rank(const Schedule& step) {
  Ranking found;
  double of_fixed = 0.0, of_anchors = 0.0;
  for (int r = 0; r < step.num_requests; ++r) {
    const double* row = step.survival + step.offsets[r];
    const int width = step.offsets[r + 1] - step.offsets[r], fixed = step.fixed[r];
    const double weight = step.weights == nullptr ? 1.0 : step.weights[r];
    double falling = 1.0;
    for (int k = 0; k < (fixed < 0 ? width : fixed); ++k) {
      falling = std::min(falling, row[k]);
      if (fixed >= 0) {
        of_fixed += weight * falling;
      } else if (weight * falling > 0.0) {
        found.slots.push_back({weight * falling, k, r});
      }
    }
    of_anchors += weight;
    found.num_fixed += std::max(fixed, 0);
  }
  found.tokens = step.num_requests + found.num_fixed + step.prefill_tokens;
  found.tau = of_anchors + of_fixed;
  std::sort(found.slots.begin(), found.slots.end(), [](const Slot& a, const Slot& b) {
    if (a.survival != b.survival) return a.survival > b.survival;
    return a.place != b.place ? a.place < b.place : a.request < b.request;
  });
  return found;
}

// How many of these ranked slots are verified: to the first that does not raise Theta, then to the bucket's edge.
// tau_there: what the step then yields.
inline int64_t num_admitted(const Schedule& step, const Ranking& ranking, const Slot* slots, int64_t num_slots,
                            double draft_s, int64_t floor, double* tau_there) {
  const double* seconds = step.verify_s + ranking.tokens;
  floor = std::min(std::max<int64_t>(floor, 0), num_slots);
  double tau = ranking.tau;
  for (int64_t i = 0; i < floor; ++i) tau += slots[i].survival;
  int64_t stop = floor;
  double theta = tau / (seconds[stop] + step.others_s + draft_s);
  while (stop < num_slots) {
    const double next = (tau + slots[stop].survival) / (seconds[stop + 1] + step.others_s + draft_s);
    if (next <= theta) break;
    tau += slots[stop++].survival;
    theta = next;
  }
  const int64_t edge = std::min<int64_t>(step.padded[ranking.tokens + stop] - ranking.tokens, num_slots);
  while (stop < edge) tau += slots[stop++].survival;
  *tau_there = tau;
  return stop;
}

// lengths: [R]. capacity: -1 = none. False, and nothing decided, when the step is not sound.
inline bool allocate(const Schedule& step, double draft_s, int64_t capacity, int64_t floor, int32_t* lengths) {
  if (!is_sound(step)) return false;
  const Ranking ranking = rank(step);
  int64_t num_slots = int64_t(ranking.slots.size());
  if (capacity >= 0) num_slots = std::min(num_slots, std::max<int64_t>(0, capacity - ranking.num_fixed));
  double tau;
  const int64_t stop =
      num_admitted(step, ranking, ranking.slots.data(), num_slots, draft_s, floor - ranking.num_fixed, &tau);
  for (int r = 0; r < step.num_requests; ++r) lengths[r] = std::max(step.fixed[r], 0);
  for (int64_t i = 0; i < stop; ++i) ++lengths[ranking.slots[i].request];
  return true;
}

// Open requests that are not free with something to gain, most first.
inline std::vector<int32_t> by_gain(const Schedule& step, const Ranking& ranking, const uint8_t* is_free) {
  const double* seconds = step.verify_s + ranking.tokens;
  const int64_t num_slots = int64_t(ranking.slots.size());
  const double first = seconds[0] + step.others_s, last = seconds[num_slots] + step.others_s;
  const double price = (last - first) / double(std::max<int64_t>(num_slots, 1)) * ranking.tau / first;
  std::vector<double> gain(step.num_requests), total(step.num_requests);
  for (const Slot& slot : ranking.slots) {
    gain[slot.request] += std::max(slot.survival - price, 0.0);
    total[slot.request] += slot.survival;
  }
  std::vector<int32_t> order;
  for (int32_t r = 0; r < step.num_requests; ++r) {
    if (total[r] > 0.0 && !is_free[r]) order.push_back(r);
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return gain[a] != gain[b] ? gain[a] > gain[b] : total[a] > total[b];
  });
  return order;
}

// drafted: [R]. draft_s: [R + 1] seconds of drafting for 0, 1, ... requests. max_drafted: -1 = no bound. False as above.
inline bool choose_drafting(const Schedule& step, const uint8_t* is_free, const double* draft_s, double min_gain,
                            int32_t max_drafted, int32_t most_tried, uint8_t* drafted) {
  if (!is_sound(step)) return false;
  const Ranking ranking = rank(step);
  const std::vector<int32_t> order = by_gain(step, ranking, is_free);
  std::vector<int32_t> place(step.num_requests, step.num_requests);
  int32_t num_forced = 0;
  for (int32_t i = 0; i < int32_t(order.size()); ++i) place[order[i]] = i;
  for (int32_t r = 0; r < step.num_requests; ++r) {
    if (is_free[r]) place[r] = -1;
    else num_forced += step.fixed[r] > 0;
  }
  int32_t largest = int32_t(order.size());
  if (max_drafted >= 0) largest = std::min(largest, std::max(0, max_drafted - num_forced));
  std::vector<Slot> chosen;
  chosen.reserve(ranking.slots.size());
  const auto rate = [&](int32_t num_drafted) {
    chosen.clear();
    for (const Slot& slot : ranking.slots) {
      if (place[slot.request] < num_drafted) chosen.push_back(slot);
    }
    const double drafting = draft_s[num_forced + num_drafted];
    double tau;
    const int64_t stop = num_admitted(step, ranking, chosen.data(), int64_t(chosen.size()), drafting, 0, &tau);
    return tau / (step.verify_s[step.padded[ranking.tokens + stop]] + step.others_s + drafting);
  };
  const int32_t stride = std::max(1, (largest + most_tried - 1) / most_tried);
  const double plain = rate(0);
  int32_t best = 0;
  double highest = plain;
  const auto consider = [&](int32_t size) {
    const double found = rate(size);
    if (found > highest) best = size, highest = found;
  };
  for (int32_t size = stride; size < largest; size += stride) consider(size);
  if (largest > 0) consider(largest);
  if (stride > 1) {
    const int32_t from = std::max(0, best - stride + 1), to = std::min(largest, best + stride - 1);
    best = from, highest = rate(from);
    for (int32_t size = from + 1; size <= to; ++size) consider(size);
  }
  if (highest < (1.0 + min_gain) * plain) best = 0;
  for (int32_t r = 0; r < step.num_requests; ++r) {
    drafted[r] = (place[r] >= 0 && place[r] < best) || (step.fixed[r] > 0 && !is_free[r]);
  }
  return true;
}

}  // namespace dspark
