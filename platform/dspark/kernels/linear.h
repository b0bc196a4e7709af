// Products of a few rows with bfloat16 weights in panels. Slow twin: `torch.nn.functional.linear`.
//
//     weight [out, in]  ->  panels [ceil(out / 32)][in / 2][32][2]
//
// A panel's weights are read once, from start to end, for all rows. A row's sums are formed in the same order whatever
// the number of rows, so its result is the same to the last bit alone and among others.
#pragma once

#include "common.h"

#if DSPARK_BF16_DOT
namespace dspark {

constexpr int PANEL = 32;       // outputs
constexpr int BLOCK = 12;       // rows whose sums fit into the registers
constexpr int AHEAD = 8192;     // bytes fetched ahead of their use

struct Linear {
  const bf16* weight;
  const bf16* bias;  // may be null
  int32_t in, out;

  int panels() const { return (out + PANEL - 1) / PANEL; }
};

template <int ROWS>
void product(const bf16* x, int in, const bf16* weight, float* tile) {
  __m512 sums[ROWS][2];
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = _mm512_setzero_ps();
  for (int pair = 0; pair < in / 2; ++pair, weight += 2 * PANEL) {
    _mm_prefetch(reinterpret_cast<const char*>(weight) + AHEAD, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(weight) + AHEAD + 64, _MM_HINT_T0);
    const __m512bh left = (__m512bh)_mm512_loadu_si512(weight);
    const __m512bh right = (__m512bh)_mm512_loadu_si512(weight + PANEL);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
      int32_t both;
      std::memcpy(&both, x + int64_t(row) * in + 2 * pair, 4);
      const __m512bh inputs = (__m512bh)_mm512_set1_epi32(both);
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], left, inputs);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], right, inputs);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) {
    _mm512_storeu_ps(tile + row * PANEL, sums[row][0]);
    _mm512_storeu_ps(tile + row * PANEL + 16, sums[row][1]);
  }
}

using Product = void (*)(const bf16*, int, const bf16*, float*);
constexpr Product PRODUCTS[BLOCK + 1] = {nullptr,    product<1>, product<2>, product<3>,  product<4>,  product<5>, product<6>,
                                         product<7>, product<8>, product<9>, product<10>, product<11>, product<12>};

// Sums of a panel for rows first … first + num_rows - 1, bias included: tile [num_rows][PANEL].
inline void panel_sums(const Linear& linear, const bf16* x, int panel, int64_t first, int num_rows, float* tile) {
  const bf16* weight = linear.weight + int64_t(panel) * linear.in * PANEL;
  PRODUCTS[num_rows](x + first * linear.in, linear.in, weight, tile);
  if (linear.bias == nullptr) return;
  const int columns = std::min(PANEL, linear.out - panel * PANEL);
  for (int row = 0; row < num_rows; ++row) {
    for (int c = 0; c < columns; ++c) tile[row * PANEL + c] += widen(linear.bias[panel * PANEL + c]);
  }
}

// Rows of a block, so that no block is much smaller than others: few sums at once cannot hide each other's delay.
inline int64_t block_rows(int64_t rows) {
  const int64_t blocks = std::max<int64_t>(1, (rows + BLOCK - 1) / BLOCK);
  return std::max<int64_t>(1, (rows + blocks - 1) / blocks);
}

// Calls store(row, column, sums, columns) for what a panel gives each row: `columns` outputs from `column` on.
template <class Store>
void each_row(const Linear& linear, const bf16* x, int64_t rows, int panel, Store store) {
  alignas(64) float tile[BLOCK * PANEL];
  const int columns = std::min(PANEL, linear.out - panel * PANEL);
  const int64_t block = block_rows(rows);
  for (int64_t first = 0; first < rows; first += block) {
    const int num_rows = int(std::min(block, rows - first));
    panel_sums(linear, x, panel, first, num_rows, tile);
    for (int row = 0; row < num_rows; ++row) store(first + row, panel * PANEL, tile + row * PANEL, columns);
  }
}

// out[row * stride …] = x W^T + b
inline void write_panel(const Linear& linear, const bf16* x, int64_t rows, int panel, bf16* out, int64_t stride) {
  each_row(linear, x, rows, panel, [&](int64_t row, int column, const float* sums, int columns) {
    bf16* to = out + row * stride + column;
#pragma GCC ivdep
    for (int c = 0; c < columns; ++c) narrow(sums[c], to[c]);
  });
}

// out = residual + (x W^T + b), both [rows, linear.out]
inline void add_panel(const Linear& linear, const bf16* x, int64_t rows, int panel, const bf16* residual, bf16* out) {
  each_row(linear, x, rows, panel, [&](int64_t row, int column, const float* sums, int columns) {
    const int64_t at = row * linear.out + column;
#pragma GCC ivdep
    for (int c = 0; c < columns; ++c) narrow(widen(residual[at + c]) + rounded(sums[c]), out[at + c]);
  });
}

// out = silu(x G^T) * (x U^T), [rows, gate.out]
inline void gated_panel(const Linear& gate, const Linear& up, const bf16* x, int64_t rows, int panel, bf16* out) {
  alignas(64) float gates[BLOCK * PANEL], ups[BLOCK * PANEL];
  const int columns = std::min(PANEL, gate.out - panel * PANEL);
  const int64_t block = block_rows(rows);
  for (int64_t first = 0; first < rows; first += block) {
    const int num_rows = int(std::min(block, rows - first));
    panel_sums(gate, x, panel, first, num_rows, gates);
    panel_sums(up, x, panel, first, num_rows, ups);
    for (int i = 0; i < num_rows * PANEL; ++i) {
      const float g = rounded(gates[i]);
      ups[i] = rounded(g / (1.0f + exponential(-g))) * rounded(ups[i]);
    }
    for (int row = 0; row < num_rows; ++row) {
      bf16* to = out + (first + row) * gate.out + panel * PANEL;
      for (int c = 0; c < columns; ++c) narrow(ups[row * PANEL + c], to[c]);
    }
  }
}

// Below so many bytes and operations of a product one thread is done before others are awake.
constexpr int64_t SMALL_BYTES = 2 << 20, SMALL_OPERATIONS = 16'000'000;

inline void linear(const Linear& linear, const bf16* x, int64_t rows, bf16* out, int num_threads) {
  const int64_t numbers = int64_t(linear.in) * linear.out;
  const bool is_small = 2 * numbers < SMALL_BYTES && 2 * numbers * rows < SMALL_OPERATIONS;
  Turns turns;
#pragma omp parallel num_threads(is_small ? 1 : num_threads)
  turns.each(linear.panels(), [&](int64_t panel) { write_panel(linear, x, rows, int(panel), out, linear.out); });
}

}  // namespace dspark
#endif
