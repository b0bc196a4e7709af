// What Python calls, by plain C names and addresses: nothing of PyTorch's is compiled in, which keeps the build to
// seconds and the result usable by every version of it.
#include "chain.h"
#include "draft.h"
#include "schedule.h"

using namespace dspark;

// Index of the first of a row's largest numbers.
template <class T>
int64_t largest_of(const T* row, int64_t columns) {
  constexpr int64_t PART = 1024;
  float top = -INFINITY;
  int64_t start = 0;
  for (int64_t first = 0; first < columns; first += PART) {
    const int64_t stop = std::min(columns, first + PART);
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t i = first; i < stop; ++i) largest = std::max(largest, widen(row[i]));
    if (largest > top) top = largest, start = first;
  }
  while (start < columns - 1 && widen(row[start]) != top) ++start;
  return start;
}

extern "C" {

int dspark_has_bf16_dot() { return DSPARK_BF16_DOT; }

void dspark_attention(const Batch* batch, const Attention* a) {
  if (a->is_bf16) {
    attention<bf16>(*batch, *a);
  } else {
    attention<float>(*batch, *a);
  }
}

void dspark_argmax(const void* rows, int is_bf16, int64_t num_rows, int64_t columns, int64_t* out, int num_threads) {
  Turns turns;
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min<int64_t>(num_threads, num_rows))))
  turns.each(num_rows, [&](int64_t i) {
    out[i] = is_bf16 ? largest_of(static_cast<const bf16*>(rows) + i * columns, columns)
                     : largest_of(static_cast<const float*>(rows) + i * columns, columns);
  });
}

int dspark_allocate(const Schedule* step, double draft_s, int64_t capacity, int64_t floor, int32_t* lengths) {
  return allocate(*step, draft_s, capacity, floor, lengths);
}

int dspark_choose_drafting(const Schedule* step, const Search* search, uint8_t* drafted, int32_t* lengths) {
  return choose_drafting(*step, *search, drafted, lengths);
}

#if DSPARK_BF16_DOT
void dspark_linear(const bf16* weight, const bf16* bias, int in, int out, const bf16* x, int64_t rows, bf16* product,
                   int num_threads) {
  linear({weight, bias, in, out}, x, rows, product, num_threads);
}

void dspark_layers(const LayersCall* call, const Batch* batch) { run_layers(*call, *batch); }

void dspark_draft(const DraftCall* call, const Batch* batch) { draft(*call, *batch); }

void dspark_chain(const ChainCall* call, const Batch* batch) { chain(*call, *batch); }
#endif

}  // extern "C"
