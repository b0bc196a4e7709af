// What the kernels share: numbers, threads that meet, and the structures that Python fills in (dspark/native.py).
//
// Legend: B batch tokens (rows), R pieces, H query heads, K key/value heads, D head width, S slots, d hidden size.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define DSPARK_BF16_DOT 1
#else
#define DSPARK_BF16_DOT 0
#endif

namespace dspark {

struct bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, bf16& out) {  // to the nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = uint16_t(x == x ? rounded : 0x7fc0u);
}

inline float rounded(float x) {
  bf16 short_form;
  narrow(x, short_form);
  return widen(short_form);
}

// e^x to about 1e-7. Exactly 1 at 0, and exactly 0 below -87: hidden keys have a score of -inf.
inline float exponential(float x) {
  const float clamped = std::min(std::max(x, -87.0f), 88.0f);
  const float whole = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;  // adding 1.5 * 2^23 rounds to integers
  const float rest = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  const float power = std::bit_cast<float>((int32_t(whole) + 127) << 23);
  return x < -87.0f ? 0.0f : p * power;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Where all threads of a team meet. It spins for a while and then lets others run: OpenMP's own barrier does what
// GOMP_SPINCOUNT says, and sleeping 200 times in a step costs more than the step.
class Barrier {
 public:
  void wait(int team) {
    if (team == 1) return;
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == team - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < 2000) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
};

// Numbered work that threads take in turn: a thread that another process holds up delays nobody by its whole share.
class Turns {
 public:
  template <class Work>
  void each(int64_t count, Work work) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
  }

 private:
  alignas(64) std::atomic<int64_t> next_{0};
};

// The same number of neighbours for every thread: for work so small that taking turns would cost more.
template <class Work>
void share(int64_t count, int thread, int team, Work work) {
  for (int64_t i = count * thread / team; i < count * (thread + 1) / team; ++i) work(i);
}

// One step's pieces and their pages; mirrored by `native.Batch`.
struct Batch {
  int32_t num_pieces, num_tokens, page_size, is_causal, num_threads, unused;
  const int32_t* cu_seqlens;   // [R + 1] a piece's rows
  const int32_t* starts;       // [R] position of its first row
  const int32_t* stops;        // [R] it sees keys before this position
  const int32_t* first_pages;  // [R + 1] its pages among all
  const int32_t* pages;
  const int64_t* slots;  // [B] where each row's own key and value are stored
};

}  // namespace dspark
