// The tokens of EAGLE-3 and of MTP with one module, all passes in one call: over the context's new rows, then over a
// row per draft token. Slow twin: `engine/paged_autoregressive_runner.py:_chain`.
//
//     row       u = [norm(embed(token behind)); norm(state)]; EAGLE-3: state += attention(u), then its feed-forward
//                                                             MTP: state = norm(layer(W u))
//     token     x = choose(W_head norm(state)); MTP's states are normed already
//
// Legend: R requests, n new rows of the contexts, N tokens to draft in all, V' draft vocabulary, d hidden size,
// m captured layers, K key/value heads, S slots, D head width, P positions that angles are known of.
#pragma once

#include "draw.h"
#include "layer.h"

#if DSPARK_BF16_DOT
namespace dspark {

// A drafter's weights; mirrored by `native.ChainDrafter`. fc: null where features are the states. join: W, null where
// u is the layer's input and the state its residual. state_norm is that of u, norm that before the head.
struct ChainDrafter {
  Linear fc, join, head;
  const bf16 *token_norm, *state_norm, *norm, *embedding;
  const Layer* layer;
  float eps;
  int32_t size;  // d
};

// A round; mirrored by `native.ChainCall`. Of the batch's rows a request's first are those of its context, the others
// those of its tokens, of which the last needs none.
struct ChainCall {
  const ChainDrafter* drafter;
  bf16 *keys, *values;      // [K, S, D]
  const float *cos, *sin;   // [P, D]
  const bf16* const* parts; // features of the new rows, [rows, m d] each, in the order of the requests
  const int32_t* part_rows;
  const int32_t* num_new;   // [R] of these rows
  const int64_t* ids;       // [n] the token behind each of them
  const bf16* const* held;  // [R] the state at the newest row of a request without new ones; may be null for others
  bf16* newest;             // [R, d] the state at the newest row of each context
  int64_t num_slots;        // S
  Choice choice;
};

// Kept from call to call.
struct ChainBuffers {
  std::vector<bf16> features, states, from, joined, out, newest, heads;
  std::vector<float> cos, sin;
  LayerBuffers layers;
};

// One pass: its rows, and whose token is drawn behind it.
struct Pass {
  std::vector<int32_t> requests, cu_seqlens{0}, starts, stops, first_pages;  // of its pieces
  std::vector<int64_t> slots, positions;
  std::vector<int32_t> drawing;            // requests
  std::vector<int32_t> last_rows, places;  // [R] a request's last row, its place among those that draw; -1 without
  Batch batch;
  LayersCall layers;
  std::vector<LayerWork> works;
  Turns joins, heads, choices;
};

class ChainRound {
 public:
  ChainRound(const ChainCall& call, const Batch& batch, ChainBuffers& buffers)
      : call_(call), drafter_(*call.drafter), layer_(*drafter_.layer), batch_(batch), buffers_(buffers),
        size_(drafter_.size), choices_(call.choice, batch.num_pieces, batch.num_threads),
        passes_(std::max(1, choices_.num_slots())), ids_(batch.num_pieces) {
    list_features();
    for (int number = 0; number < int(passes_.size()); ++number) plan(passes_[number], number);
    reserve();
  }

  // A thread's part.
  void run(int thread, int team, Scratch& scratch) {
    read_features(thread, team);
    for (int number = 0; number < int(passes_.size()); ++number) {
      Pass& pass = passes_[number];
      if (pass.batch.num_tokens > 0) {
        feed(pass, number, thread, team);
        LayerWork& work = pass.works[0];
        if (drafter_.join.weight == nullptr) {
          run_normed(work, pass.layers, pass.batch, buffers_.layers, thread, team, barrier_, scratch);
        } else {
          run_part(work, pass.layers, pass.batch, buffers_.layers, thread, team, barrier_, scratch);
        }
      }
      take_states(pass, number, thread, team);
      draw(pass, number, thread, team);
    }
  }

 private:
  void list_features() {
    int part = 0, row = 0;  // where the next row's features lie
    const int64_t width = drafter_.fc.weight == nullptr ? size_ : drafter_.fc.in;
    for (int r = 0; r < batch_.num_pieces; ++r) {
      for (int i = 0; i < call_.num_new[r]; ++i) {
        while (row == call_.part_rows[part]) ++part, row = 0;
        features_.push_back(call_.parts[part] + int64_t(row++) * width);
      }
    }
  }

  void plan(Pass& pass, int number) {
    pass.last_rows.assign(batch_.num_pieces, -1), pass.places.assign(batch_.num_pieces, -1);
    for (int r = 0; r < batch_.num_pieces; ++r) {
      if (choices_.has(r, number)) {
        pass.places[r] = int32_t(pass.drawing.size());
        pass.drawing.push_back(r);
      }
      const int count = number == 0 ? call_.num_new[r] : int(choices_.has(r, number));
      if (count == 0) continue;
      const int first = number == 0 ? 0 : call_.num_new[r] + number - 1;  // among the request's rows
      pass.requests.push_back(r);
      pass.cu_seqlens.push_back(pass.cu_seqlens.back() + count);
      pass.last_rows[r] = pass.cu_seqlens.back() - 1;
      pass.starts.push_back(batch_.starts[r] + first);
      pass.stops.push_back(batch_.starts[r] + first + count);
      pass.first_pages.push_back(batch_.first_pages[r]);
      for (int i = first; i < first + count; ++i) {
        pass.slots.push_back(batch_.slots[batch_.cu_seqlens[r] + i]);
        pass.positions.push_back(batch_.starts[r] + i);
      }
    }
    pass.batch = batch_;
    pass.batch.num_pieces = int32_t(pass.requests.size());
    pass.batch.num_tokens = pass.cu_seqlens.back();
    pass.batch.cu_seqlens = pass.cu_seqlens.data();
    pass.batch.starts = pass.starts.data();
    pass.batch.stops = pass.stops.data();
    pass.batch.first_pages = pass.first_pages.data();
    pass.batch.slots = pass.slots.data();
  }

  void reserve() {
    int64_t rows = batch_.num_pieces, dim = layer_.head_dim;
    for (const Pass& pass : passes_) rows = std::max<int64_t>(rows, pass.batch.num_tokens);
    const int64_t n = int64_t(features_.size());
    if (drafter_.fc.weight != nullptr) at_least(buffers_.features, n * drafter_.fc.in);
    at_least(buffers_.states, std::max<int64_t>(n, 1) * size_), at_least(buffers_.from, rows * size_);
    at_least(buffers_.joined, rows * 2 * size_), at_least(buffers_.out, rows * size_);
    at_least(buffers_.newest, batch_.num_pieces * size_), at_least(buffers_.heads, batch_.num_pieces * size_);
    at_least(buffers_.cos, rows * dim), at_least(buffers_.sin, rows * dim);
    reserve_layer(layer_, rows, buffers_.layers);
    for (Pass& pass : passes_) {
      pass.layers = LayersCall{buffers_.from.data(), buffers_.out.data(), buffers_.cos.data(), buffers_.sin.data(),
                               &drafter_.layer, &call_.keys, &call_.values, nullptr, call_.num_slots, 1, 1};
      if (pass.batch.num_tokens > 0) pass.works = layer_works(pass.layers, pass.batch, buffers_.layers);
    }
  }

  // What the context's new rows hold of the target.
  void read_features(int thread, int team) {
    const int64_t n = int64_t(features_.size()), width = drafter_.fc.weight == nullptr ? size_ : drafter_.fc.in;
    bf16* to = drafter_.fc.weight == nullptr ? buffers_.states.data() : buffers_.features.data();
    share(n, thread, team, [&](int64_t i) { std::copy_n(features_[i], width, to + i * width); });
    share(batch_.num_pieces, thread, team, [&](int64_t r) {
      if (call_.num_new[r] > 0) return;
      std::copy_n(call_.held[r], size_, call_.newest + r * size_);
      std::copy_n(call_.held[r], size_, buffers_.newest.data() + r * size_);
    });
    barrier_.wait(team);
    if (drafter_.fc.weight == nullptr) return;
    contexts_.each(drafter_.fc.panels(), [&](int64_t panel) {
      write_panel(drafter_.fc, buffers_.features.data(), n, int(panel), buffers_.states.data(), size_);
    });
    barrier_.wait(team);
  }

  // u and the residual of a pass's rows, and their angles.
  void feed(Pass& pass, int number, int thread, int team) {
    const int64_t rows = pass.batch.num_tokens, dim = layer_.head_dim;
    const bool is_joined = drafter_.join.weight != nullptr;
    bf16* inputs = is_joined ? buffers_.joined.data() : buffers_.layers.normed.data();
    share(rows, thread, team, [&](int64_t row) {
      const int32_t r = number == 0 ? 0 : pass.requests[row];
      const bf16* state = number == 0 ? buffers_.states.data() + row * size_ : buffers_.newest.data() + r * size_;
      const int64_t id = number == 0 ? call_.ids[row] : ids_[r];
      bf16* own = inputs + 2 * row * size_;
      rms_norm(drafter_.embedding + id * size_, drafter_.token_norm, int(size_), drafter_.eps, own);
      rms_norm(state, drafter_.state_norm, int(size_), drafter_.eps, own + size_);
      if (!is_joined) std::copy_n(state, size_, buffers_.from.data() + row * size_);
      std::copy_n(call_.cos + pass.positions[row] * dim, dim, buffers_.cos.data() + row * dim);
      std::copy_n(call_.sin + pass.positions[row] * dim, dim, buffers_.sin.data() + row * dim);
    });
    barrier_.wait(team);
    if (!is_joined) return;
    pass.joins.each(drafter_.join.panels(), [&](int64_t panel) {
      write_panel(drafter_.join, inputs, rows, int(panel), buffers_.from.data(), size_);
    });
    barrier_.wait(team);
  }

  // The newest state of each request, and what the head is given of those that draw.
  void take_states(const Pass& pass, int number, int thread, int team) {
    const bool is_joined = drafter_.join.weight != nullptr;
    share(batch_.num_pieces, thread, team, [&](int64_t r) {
      bf16* newest = buffers_.newest.data() + r * size_;
      if (pass.last_rows[r] >= 0) {
        const bf16* row = buffers_.out.data() + int64_t(pass.last_rows[r]) * size_;
        if (is_joined) {
          rms_norm(row, drafter_.norm, int(size_), drafter_.eps, newest);
        } else {
          std::copy_n(row, size_, newest);
        }
        if (number == 0) std::copy_n(newest, size_, call_.newest + r * size_);
      }
      if (pass.places[r] < 0) return;
      bf16* head = buffers_.heads.data() + int64_t(pass.places[r]) * size_;
      if (is_joined) {
        std::copy_n(newest, size_, head);
      } else {
        rms_norm(newest, drafter_.norm, int(size_), drafter_.eps, head);
      }
    });
    barrier_.wait(team);
  }

  void draw(Pass& pass, int number, int thread, int team) {
    const int64_t count = int64_t(pass.drawing.size());
    choices_.forget(thread);
    pass.heads.each(count == 0 ? 0 : drafter_.head.panels(), [&](int64_t panel) {
      each_row(drafter_.head, buffers_.heads.data(), count, int(panel),
               [&](int64_t row, int column, const float* sums, int columns) {
                 choices_.look(thread, pass.drawing[row], number, column, columns, [&](float* logits) {
                   for (int c = 0; c < columns; ++c) logits[c] = rounded(sums[c]);
                 });
               });
    });
    barrier_.wait(team);
    pass.choices.each(count, [&](int64_t i) {
      const int32_t r = pass.drawing[i];
      ids_[r] = choices_.settle(r, number, 0, team);
    });
    barrier_.wait(team);
  }

  const ChainCall& call_;
  const ChainDrafter& drafter_;
  const Layer& layer_;
  const Batch& batch_;
  ChainBuffers& buffers_;
  const int64_t size_;
  Choices choices_;
  std::vector<Pass> passes_;
  std::vector<int64_t> ids_;           // [R] the newest token of each
  std::vector<const bf16*> features_;  // [n]
  Barrier barrier_;
  Turns contexts_;
};

inline void chain(const ChainCall& call, const Batch& batch) {
  static thread_local ChainBuffers buffers;
  ChainRound round(call, batch, buffers);
#pragma omp parallel num_threads(batch.num_threads)
  {
    static thread_local Scratch scratch;
    round.run(omp_get_thread_num(), omp_get_num_threads(), scratch);
  }
}

}  // namespace dspark
#endif
