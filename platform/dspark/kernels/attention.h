// Attention of a flat batch over paged memory. Its slow twin is `attention/paged.py:attend_pieces`.
//
// Keys are looked at in tiles that start at multiples of TILE whatever the batch, and a hidden key changes nothing to
// the last bit. So a row's result depends on its own request alone: not on its neighbours, nor on how many tokens are
// verified at once.
#pragma once

#include "common.h"

namespace dspark {

constexpr int TILE = 64;            // keys
constexpr int ROWS_AT_ONCE = 48;    // query rows (tokens times heads that share keys) of one work item
constexpr float LOWEST = -1.0e30f;  // finite, so that -inf minus it is -inf

// One layer's attention; mirrored by `native.Attention`. Strides are in elements.
struct Attention {
  const void* queries;
  const void* new_keys;
  const void* new_values;
  void* keys;    // [K, S, D]
  void* values;  // [K, S, D_v]
  void* out;     // [B, H, D_v]
  int64_t query_token, query_head, key_token, key_head, value_token, value_head, num_slots;
  int32_t num_heads, num_kv_heads, key_dim, value_dim, window, is_bf16;  // window 0: all is seen
  float scaling, softcap;                                                // softcap 0: none
  const float* sinks;  // [H], the score of a key more per head, whose value is zero; null: none
};

// Some tokens of a piece for one key/value head. position: of the first token; its keys lie in oldest … stop - 1.
struct Item {
  int32_t piece, kv_head, first_row, num_tokens, position, oldest, stop;
};

inline std::vector<Item> work_items(const Batch& batch, const Attention& a) {
  std::vector<Item> items;
  const int block = std::max(1, ROWS_AT_ONCE / (a.num_heads / a.num_kv_heads));
  for (int piece = 0; piece < batch.num_pieces; ++piece) {
    const int length = batch.cu_seqlens[piece + 1] - batch.cu_seqlens[piece];
    for (int first = 0; first < length; first += block) {
      const int num_tokens = std::min(block, length - first), position = batch.starts[piece] + first;
      const int oldest = (a.window > 0 ? std::max(0, position - a.window + 1) : 0) / TILE * TILE;
      const int stop = batch.is_causal ? position + num_tokens : batch.stops[piece];
      for (int head = 0; head < a.num_kv_heads; ++head) {
        items.push_back({piece, head, first, num_tokens, position, oldest, stop});
      }
    }
  }
  return items;
}

// What one thread works in.
struct Scratch {
  std::vector<float> queries, key, values, scores, sums, largest, totals, shrinks;
  std::vector<bf16> short_queries;
  std::vector<uint32_t> key_pairs;
  int64_t slots[TILE];  // of a tile's keys and values
};

inline void find_slots(const Batch& batch, int piece, int tile, int width, int64_t* slots) {
  const int32_t* page = batch.pages + batch.first_pages[piece] + tile / batch.page_size;
  int offset = tile % batch.page_size;
  for (int t = 0; t < width; ++t) {
    slots[t] = int64_t(*page) * batch.page_size + offset;
    if (++offset == batch.page_size) offset = 0, ++page;
  }
}

// Where the tile lies that is worked on next, asked for while this one is: memory is slow to answer, and pages lie
// anywhere.
template <class T>
struct Ahead {
  const T *keys, *values;
  int width = 0;
  int64_t slots[TILE];

  void fetch_keys(int first, int last, int dim) const { fetch(keys, first, last, dim); }
  void fetch_values(int first, int last, int dim) const { fetch(values, first, last, dim); }

 private:
  void fetch(const T* memory, int first, int last, int dim) const {
    for (int t = first; t < std::min(last, width); ++t) {
      const char* line = reinterpret_cast<const char*>(memory + slots[t] * dim);
      for (size_t at = 0; at < sizeof(T) * dim; at += 64) __builtin_prefetch(line + at);
    }
  }
};

template <class T>
const T* keys_of(const Attention& a, const Item& item) {
  return static_cast<const T*>(a.keys) + item.kv_head * a.num_slots * a.key_dim;
}

template <class T>
const T* values_of(const Attention& a, const Item& item) {
  return static_cast<const T*>(a.values) + item.kv_head * a.num_slots * a.value_dim;
}

// The tile behind `tile`, or the first one of the item that comes next (may be null).
template <class T>
void look_ahead(const Batch& batch, const Attention& a, const Item& item, int tile, const Item* next, Ahead<T>& ahead) {
  const bool is_last = tile + TILE >= item.stop;
  ahead.width = 0;
  if (is_last && next == nullptr) return;
  const Item& one = is_last ? *next : item;
  const int first = is_last ? next->oldest : tile + TILE;
  ahead.keys = keys_of<T>(a, one);
  ahead.values = values_of<T>(a, one);
  ahead.width = std::min(TILE, one.stop - first);
  find_slots(batch, one.piece, first, ahead.width, ahead.slots);
}

// Stores row `index / K`'s key and value of head `index % K`.
template <class T>
void store_new(const Batch& batch, const Attention& a, int64_t index) {
  const int64_t row = index / a.num_kv_heads, head = index % a.num_kv_heads;
  const int64_t slot = head * a.num_slots + batch.slots[row];
  const T* key = static_cast<const T*>(a.new_keys) + row * a.key_token + head * a.key_head;
  const T* value = static_cast<const T*>(a.new_values) + row * a.value_token + head * a.value_head;
  std::memcpy(static_cast<T*>(a.keys) + slot * a.key_dim, key, sizeof(T) * a.key_dim);
  std::memcpy(static_cast<T*>(a.values) + slot * a.value_dim, value, sizeof(T) * a.value_dim);
}

#if DSPARK_BF16_DOT
// Rows and columns of 16 x 16 numbers of 32 bits, exchanged.
inline void transpose(__m512i* rows) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {  // rows[4 i + j]: in each lane L, column 4 L + j of rows 4 i … 4 i + 3
    rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  std::copy(t, t + 16, rows);
}

// Keys of a tile pair by pair of their elements, 16 keys beside each other: [TILE / 16][dim / 2][16][2].
inline void load_key_pairs(const bf16* keys, int width, int dim, const Ahead<bf16>& ahead, Scratch& s) {
  const int pairs = dim / 2;
  for (int group = 0; group < TILE / 16; ++group) {
    ahead.fetch_keys(group * 16, group * 16 + 16, dim);
    for (int part = 0; part < pairs && group * 16 < width; part += 16) {
      __m512i lines[16];
      for (int i = 0; i < 16; ++i) {
        const int64_t slot = s.slots[std::min(group * 16 + i, width - 1)];
        lines[i] = _mm512_loadu_si512(keys + slot * dim + 2 * part);
      }
      transpose(lines);
      uint32_t* out = s.key_pairs.data() + (group * pairs + part) * 16;
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + 16 * i, lines[i]);
    }
  }
}

// Scores of all of a tile's keys for a few rows at once, since one row's sums alone would wait for each other.
template <int ROWS>
void scores_of_pairs(const bf16* queries, int dim, const uint32_t* key_pairs, float* scores) {
  const int pairs = dim / 2;
  __m512 sums[ROWS][4];
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = sums[row][2] = sums[row][3] = _mm512_setzero_ps();
  for (int pair = 0; pair < pairs; ++pair) {
    __m512bh keys[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) keys[g] = (__m512bh)_mm512_loadu_si512(key_pairs + (g * pairs + pair) * 16);
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      int32_t both;
      std::memcpy(&both, queries + row * dim + 2 * pair, 4);
      const __m512bh query = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) sums[row][g] = _mm512_dpbf16_ps(sums[row][g], keys[g], query);
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) _mm512_storeu_ps(scores + row * TILE + 16 * g, sums[row][g]);
  }
}
#endif

// Calls work(row, count) for rows in groups of up to four, count being a constant of the compiler's.
template <class Work>
void by_four(int num_rows, Work work) {
  for (int row = 0; row < num_rows; row += 4) {
    switch (std::min(4, num_rows - row)) {
      case 1: work(row, std::integral_constant<int, 1>{}); break;
      case 2: work(row, std::integral_constant<int, 2>{}); break;
      case 3: work(row, std::integral_constant<int, 3>{}); break;
      default: work(row, std::integral_constant<int, 4>{});
    }
  }
}

template <class T>
void scores_one_by_one(const T* keys, int width, int num_rows, int dim, Scratch& s) {
  for (int t = 0; t < width; ++t) {
    const T* key = keys + s.slots[t] * dim;
    for (int i = 0; i < dim; ++i) s.key[i] = widen(key[i]);
    for (int row = 0; row < num_rows; ++row) {
      const float* query = s.queries.data() + row * dim;
      const float* wide = s.key.data();
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int i = 0; i < dim; ++i) sum += query[i] * wide[i];
      s.scores[row * TILE + t] = sum;
    }
  }
}

// Raw scores of keys at positions tile … become weights; returns by how much what was summed before shrinks.
// Source: online softmax (Milakov and Gimelshein 2018).
inline float weigh(float* scores, const Attention& a, int tile, int first, int last, float& largest, float& total) {
  float top = largest;
#pragma omp simd reduction(max : top)
  for (int t = 0; t < TILE; ++t) {
    float score = scores[t] * a.scaling;
    if (a.softcap > 0.0f) score = a.softcap - 2.0f * a.softcap / (exponential(2.0f * score / a.softcap) + 1.0f);
    score = tile + t >= first && tile + t <= last ? score : -INFINITY;
    scores[t] = score;
    top = std::max(top, score);
  }
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int t = 0; t < TILE; ++t) {
    scores[t] = exponential(scores[t] - top);
    sum += scores[t];
  }
  const float shrink = exponential(largest - top);
  total = total * shrink + sum;
  largest = top;
  return shrink;
}

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));

// sums[row][N * 16] = sums * shrinks[row] + weights[row][width] . values[width][N * 16]
template <int ROWS, int N>
void mix(const float* weights, const float* shrinks, const float* values, int width, int stride, float* sums) {
  Lanes held[ROWS][N];
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      held[row][n] = *reinterpret_cast<const Lanes*>(sums + row * stride + 16 * n) * shrinks[row];
    }
  }
  for (int t = 0; t < width; ++t) {
    Lanes value[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) value[n] = *reinterpret_cast<const Lanes*>(values + t * stride + 16 * n);
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      const float weight = weights[row * TILE + t];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) held[row][n] += weight * value[n];
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) *reinterpret_cast<Lanes*>(sums + row * stride + 16 * n) = held[row][n];
  }
}

template <class T>
void load_queries(const Batch& batch, const Attention& a, const Item& item, Scratch& s, bool in_pairs) {
  const int group = a.num_heads / a.num_kv_heads, dim = a.key_dim;
  s.queries.resize(size_t(item.num_tokens) * group * dim);
  s.short_queries.resize(s.queries.size());
  for (int row = 0; row < item.num_tokens * group; ++row) {
    const int64_t token = batch.cu_seqlens[item.piece] + item.first_row + row / group;
    const int64_t head = int64_t(item.kv_head) * group + row % group;
    const T* query = static_cast<const T*>(a.queries) + token * a.query_token + head * a.query_head;
    if (in_pairs) {
      std::memcpy(s.short_queries.data() + row * dim, query, sizeof(T) * dim);
    } else {
      for (int i = 0; i < dim; ++i) s.queries[row * dim + i] = widen(query[i]);
    }
  }
}

template <class T>
void load_values(const T* values, int width, int dim, int stride, const Ahead<T>& ahead, Scratch& s) {
  for (int t = 0; t < TILE; ++t) {
    ahead.fetch_values(t, t + 1, dim);
    if (t >= width) continue;
    const T* value = values + s.slots[t] * dim;
    float* wide = s.values.data() + t * stride;
    for (int i = 0; i < dim; ++i) wide[i] = widen(value[i]);
  }
}

// next: the item this thread will probably work on after this one; may be null.
template <class T>
void attend_item(const Batch& batch, const Attention& a, const Item& item, const Item* next, Scratch& s) {
  const int group = a.num_heads / a.num_kv_heads, num_rows = item.num_tokens * group;
  const int stride = (a.value_dim + 15) / 16 * 16;
  const bool in_pairs = DSPARK_BF16_DOT && sizeof(T) == 2 && a.key_dim % 32 == 0;
  const T *keys = keys_of<T>(a, item), *values = values_of<T>(a, item);
  load_queries<T>(batch, a, item, s, in_pairs);
  s.key.resize(a.key_dim);
  s.key_pairs.resize(TILE * a.key_dim / 2);
  s.values.assign(size_t(TILE) * stride, 0.0f);  // what pads a value stays zero
  s.scores.assign(size_t(num_rows) * TILE, 0.0f);
  s.sums.assign(size_t(num_rows) * stride, 0.0f);
  s.largest.assign(num_rows, LOWEST);
  s.totals.assign(num_rows, 0.0f);
  s.shrinks.resize(num_rows);
  for (int row = 0; a.sinks && row < num_rows; ++row) {
    s.largest[row] = std::max(LOWEST, a.sinks[int64_t(item.kv_head) * group + row % group]);
    s.totals[row] = 1.0f;
  }

  Ahead<T> ahead;
  for (int tile = item.oldest; tile < item.stop; tile += TILE) {
    const int width = std::min(TILE, item.stop - tile);
    find_slots(batch, item.piece, tile, width, s.slots);
    look_ahead(batch, a, item, tile, next, ahead);
#if DSPARK_BF16_DOT
    if constexpr (sizeof(T) == 2) {
      if (in_pairs) {
        load_key_pairs(keys, width, a.key_dim, ahead, s);
        by_four(num_rows, [&](int row, auto count) {
          scores_of_pairs<count>(s.short_queries.data() + row * a.key_dim, a.key_dim, s.key_pairs.data(),
                                 s.scores.data() + row * TILE);
        });
      }
    }
#endif
    if (!in_pairs) scores_one_by_one(keys, width, num_rows, a.key_dim, s);
    load_values(values, width, a.value_dim, stride, ahead, s);
    for (int row = 0; row < num_rows; ++row) {
      const int own = item.position + row / group;
      const int first = a.window > 0 ? own - a.window + 1 : 0, last = batch.is_causal ? own : item.stop - 1;
      s.shrinks[row] = weigh(s.scores.data() + row * TILE, a, tile, first, last, s.largest[row], s.totals[row]);
    }
    by_four(num_rows, [&](int row, auto count) {
      const float *weights = s.scores.data() + row * TILE, *shrinks = s.shrinks.data() + row;
      float* sums = s.sums.data() + row * stride;
      int column = 0;
      for (; column + 64 <= stride; column += 64) {
        mix<count, 4>(weights, shrinks, s.values.data() + column, width, stride, sums + column);
      }
      for (; column < stride; column += 16) {
        mix<count, 1>(weights, shrinks, s.values.data() + column, width, stride, sums + column);
      }
    });
  }
  for (int row = 0; row < num_rows; ++row) {
    const int64_t token = batch.cu_seqlens[item.piece] + item.first_row + row / group;
    const int64_t head = int64_t(item.kv_head) * group + row % group;
    T* out = static_cast<T*>(a.out) + (token * a.num_heads + head) * a.value_dim;
    const float scale = 1.0f / s.totals[row];
    for (int i = 0; i < a.value_dim; ++i) narrow(s.sums[row * stride + i] * scale, out[i]);
  }
}

template <class T>
void attend_items(const Batch& batch, const Attention& a, const std::vector<Item>& items, int team, Turns& turns,
                  Scratch& scratch) {
  turns.each(int64_t(items.size()), [&](int64_t i) {
    const Item* next = i + team < int64_t(items.size()) ? &items[i + team] : nullptr;
    attend_item<T>(batch, a, items[i], next, scratch);
  });
}

template <class T>
void attention(const Batch& batch, const Attention& a) {
  const std::vector<Item> items = work_items(batch, a);
  Barrier barrier;
  Turns turns;
#pragma omp parallel num_threads(batch.num_threads)
  {
    thread_local Scratch scratch;
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    share(int64_t(batch.num_tokens) * a.num_kv_heads, thread, team, [&](int64_t i) { store_new<T>(batch, a, i); });
    barrier.wait(team);
    attend_items<T>(batch, a, items, team, turns, scratch);
  }
}

}  // namespace dspark
