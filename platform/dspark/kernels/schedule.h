// The two searches of the scheduler in microseconds. Slow twins: `allocate` in prefix_scheduler.py and
// `choose_drafting` in drafting_choice.py of dspark/speculation, which explain the rules; here they are carried out.
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
  double others_s;          // what requests beside the first and contexts add to a step, less what other tokens do
};

constexpr double ROUNDING = 1e-6;                  // as in ranked_step.py
constexpr size_t MOST_TURNED = 32;                 // as in drafting_choice.py
constexpr int64_t DEAR_SLOTS[] = {8, 4, 2};        // as there

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

// What Algorithm 1 admits: so many slots, which yield tau with what is fixed, the last of them before place `end`.
struct Admitted {
  int64_t number, end, edge;  // edge: tokens that are then computed
  double tau;
};

// Slots of these requests (null: of all), up to the first that does not raise Theta, then to the bucket's edge.
inline Admitted admit(const Schedule& step, const Ranking& ranking, const uint8_t* is_in, double draft_s, int64_t most,
                      int64_t floor) {
  const double* seconds = step.verify_s + ranking.tokens;
  const int64_t num_slots = int64_t(ranking.slots.size());
  const auto skips = [&](int64_t i) { return is_in != nullptr && !is_in[ranking.slots[i].request]; };
  Admitted found{0, 0, 0, ranking.tau};
  const auto take = [&](int64_t i) { found.tau += ranking.slots[i].survival, ++found.number, found.end = i + 1; };
  double theta = found.tau / (seconds[0] + step.others_s + draft_s);
  int64_t i = 0;
  for (; i < num_slots && found.number < most; ++i) {
    if (skips(i)) continue;
    const double next =
        (found.tau + ranking.slots[i].survival) / (seconds[found.number + 1] + step.others_s + draft_s);
    if (found.number >= floor && next <= theta) break;
    take(i), theta = next;
  }
  found.edge = step.padded[ranking.tokens + found.number];
  const int64_t filled = std::min(found.edge - ranking.tokens, most);
  for (; i < num_slots && found.number < filled; ++i) {
    if (!skips(i)) take(i);
  }
  return found;
}

inline void add_lengths(const Schedule& step, const Ranking& ranking, const uint8_t* is_in, const Admitted& found,
                        int32_t* lengths) {
  for (int r = 0; r < step.num_requests; ++r) lengths[r] = std::max(step.fixed[r], 0);
  for (int64_t i = 0; i < found.end; ++i) {
    const int32_t request = ranking.slots[i].request;
    if (is_in == nullptr || is_in[request]) ++lengths[request];
  }
}

// Slots that may be admitted beside the fixed ones. capacity: -1 = no bound.
inline int64_t most_open(const Ranking& ranking, int64_t capacity) {
  const int64_t num_slots = int64_t(ranking.slots.size());
  return capacity < 0 ? num_slots : std::min(num_slots, std::max<int64_t>(0, capacity - ranking.num_fixed));
}

// lengths: [R]. False, and nothing decided, when the step is not sound.
inline bool allocate(const Schedule& step, double draft_s, int64_t capacity, int64_t floor, int32_t* lengths) {
  if (!is_sound(step)) return false;
  const Ranking ranking = rank(step);
  const int64_t most = most_open(ranking, capacity);
  add_lengths(step, ranking, nullptr, admit(step, ranking, nullptr, draft_s, most, floor - ranking.num_fixed), lengths);
  return true;
}

// Open requests that are not free with something to gain at a price of a slot in tokens, most first.
inline std::vector<int32_t> by_gain(const Schedule& step, const Ranking& ranking, const uint8_t* is_free,
                                    double price) {
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

// The different orders of several prices: the curve's own first.
inline std::vector<std::vector<int32_t>> orders_of(const Schedule& step, const Ranking& ranking,
                                                   const uint8_t* is_free) {
  const double* seconds = step.verify_s + ranking.tokens;
  const int64_t num_slots = int64_t(ranking.slots.size());
  const double first = seconds[0] + step.others_s, last = seconds[num_slots] + step.others_s;
  std::vector<double> prices{(last - first) / double(std::max<int64_t>(num_slots, 1)) * ranking.tau / first};
  for (const int64_t part : DEAR_SLOTS) {
    if (num_slots > 0) prices.push_back(ranking.slots[num_slots / part].survival);
  }
  prices.push_back(0.0);
  std::vector<std::vector<int32_t>> orders;
  for (const double price : prices) {
    std::vector<int32_t> order = by_gain(step, ranking, is_free, price);
    if (std::find(orders.begin(), orders.end(), order) == orders.end()) orders.push_back(std::move(order));
  }
  return orders;
}

// How the best set is looked for. draft_s: [R + 1] seconds of drafting for 0, 1, ... requests. max_drafted, capacity:
// -1 = no bound. most_tried: numbers of requests that are tried in one pass. Mirrored by `native.Search`.
struct Search {
  const uint8_t* is_free;  // [R]
  const double* draft_s;
  double min_gain;
  int64_t capacity, floor;
  int32_t max_drafted, most_tried;
};

// A search's state: the best set of open requests so far.
struct DraftingSearch {
  const Schedule& step;
  const Search& search;
  const Ranking ranking = rank(step);
  int64_t most = most_open(ranking, search.capacity);
  int32_t num_forced = 0;
  std::vector<uint8_t> set, best_set;  // [R]; whoever is free is in every set
  int32_t best_number = 0;
  double best_rate;

  DraftingSearch(const Schedule& step, const Search& search) : step(step), search(search) {
    for (int r = 0; r < step.num_requests; ++r) num_forced += step.fixed[r] > 0 && !search.is_free[r];
    set.assign(search.is_free, search.is_free + step.num_requests);
    best_set = set;
    best_rate = rate(0);
  }

  double draft_s(int32_t number) const { return search.draft_s[num_forced + number]; }
  Admitted admitted(int32_t number, int64_t floor) const {
    return admit(step, ranking, set.data(), draft_s(number), most, floor);
  }
  double rate(int32_t number) const {  // of `set`, which has so many who are not free
    const Admitted found = admitted(number, 0);
    return found.tau / (step.verify_s[found.edge] + step.others_s + draft_s(number));
  }
  void keep(double found, int32_t number) { best_set = set, best_rate = found, best_number = number; }

  // The first low, low + stride, ... and `high` of an order; true if one of them is the best now.
  bool try_sizes(const std::vector<int32_t>& order, int32_t low, int32_t high, int32_t stride) {
    bool is_better = false;
    int32_t number = 0;
    set.assign(search.is_free, search.is_free + step.num_requests);
    for (int32_t size = low;; size = std::min(size + stride, high)) {
      for (; number < size; ++number) set[order[number]] = 1;
      const double found = rate(size);
      if (found > best_rate || (found == best_rate && size < best_number)) keep(found, size), is_better = true;
      if (size == high) return is_better;
    }
  }

  // Single requests left out or taken in, as long as that helps; of equal changes the first one.
  void turn(const std::vector<int32_t>& order, int32_t largest) {
    for (bool has_changed = true; has_changed;) {
      has_changed = false;
      const std::vector<uint8_t> from = best_set;
      const int32_t number = best_number;
      for (const bool is_in : {true, false}) {
        if (!is_in && number >= largest) break;
        for (const int32_t request : order) {
          if (bool(from[request]) != is_in) continue;
          set = from;
          set[request] = !is_in;
          const int32_t turned = number + (is_in ? -1 : 1);
          const double found = rate(turned);
          if (found > best_rate) keep(found, turned), has_changed = true;
        }
      }
    }
  }
};

// drafted, lengths: [R]. False as above.
inline bool choose_drafting(const Schedule& step, const Search& search, uint8_t* drafted, int32_t* lengths) {
  if (!is_sound(step)) return false;
  DraftingSearch choice(step, search);
  const double plain = choice.best_rate;
  const auto orders = orders_of(step, choice.ranking, search.is_free);
  int32_t largest = int32_t(orders[0].size());
  if (search.max_drafted >= 0) largest = std::min(largest, std::max(0, search.max_drafted - choice.num_forced));
  if (largest > 0) {
    const int32_t stride = std::max(1, (largest + search.most_tried - 1) / search.most_tried);
    const std::vector<int32_t>* best_order = &orders[0];
    int32_t low = 0, high = largest;
    const auto near = [&](int32_t distance) {
      low = std::max(0, choice.best_number - distance), high = std::min(largest, choice.best_number + distance);
    };
    for (const auto& order : orders) {
      if (choice.try_sizes(order, low, high, stride)) best_order = &order;
      if (stride > 1 && &order == &orders[0]) near(stride);
    }
    if (stride > 1) near(stride - 1), choice.try_sizes(*best_order, low, high, 1);
  }
  if (orders[0].size() <= MOST_TURNED) choice.turn(orders[0], largest);
  choice.set = choice.best_set;
  if (choice.best_rate < (1.0 + search.min_gain) * plain) {
    choice.set.assign(search.is_free, search.is_free + step.num_requests), choice.best_number = 0;
  }
  const int64_t floor = search.floor - choice.ranking.num_fixed;
  add_lengths(step, choice.ranking, choice.set.data(), choice.admitted(choice.best_number, floor), lengths);
  for (int32_t r = 0; r < step.num_requests; ++r) {
    drafted[r] = !search.is_free[r] && (choice.set[r] || step.fixed[r] > 0);
  }
  return true;
}

}  // namespace dspark
