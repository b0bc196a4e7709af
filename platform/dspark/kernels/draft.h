// A drafter's whole round in one call: the context it is told of, its block, and the tokens of the block one by one.
// Slow twin: `engine/paged_draft_runner.py`.
//
//     context   C = norm(W_c pending); of each layer k = rotate(norm(W_k C)), v = W_v C, into pages
//     block     h_0 … h_{G-1} = norm(layers(embed(anchor), mask, mask, …)), each slot seeing context and block
//     tokens    see `draft_tokens.h`
//
// Legend: see `draft_call.h`; n context tokens to store.
#pragma once

#include "draft_tokens.h"

#if DSPARK_BF16_DOT
namespace dspark {

// Kept from call to call.
struct DraftBuffers {
  std::vector<bf16> pending, features, keys_values, hidden, seen, shifts, out;
  std::vector<float> cos, sin;
  LayerBuffers layers;
  TokenBuffers tokens;
};

// Where a token to store comes from and goes to.
struct Stored {
  const bf16* features;
  int64_t position, slot;
  int32_t request;
  bool is_newest;
};

class DraftRound {
 public:
  DraftRound(const DraftCall& call, const Batch& batch, DraftBuffers& buffers)
      : call_(call), drafter_(*call.drafter), batch_(batch), buffers_(buffers), size_(drafter_.fc.out),
        stored_(tokens_to_store(call, batch)), tokens_(call, batch, buffers.tokens) {
    reserve();
  }

  // A thread's part.
  void run(int thread, int team, Scratch& scratch) {
    gather(thread, team);
    if (!stored_.empty()) store(thread, team);
    if (drafter_.anchor_shift.weight != nullptr) shift(thread, team);
    for (LayerWork& work : works_) run_part(work, layers_, batch_, buffers_.layers, thread, team, barrier_, scratch);
    tokens_.run(buffers_.out.data(), thread, team, barrier_);
  }

 private:
  static std::vector<Stored> tokens_to_store(const DraftCall& call, const Batch& batch) {
    std::vector<Stored> stored;
    int part = 0, row = 0;  // where the next token's features lie
    for (int r = 0; r < batch.num_pieces; ++r) {
      for (int i = call.num_pending[r]; i > 0; --i) {
        while (row == call.part_rows[part]) ++part, row = 0;
        const int position = batch.starts[r] - i;
        const int32_t page = batch.pages[batch.first_pages[r] + position / batch.page_size];
        const int64_t slot = int64_t(page) * batch.page_size + position % batch.page_size;
        stored.push_back({call.parts[part] + int64_t(row++) * call.drafter->fc.in, position, slot, r, i == 1});
      }
    }
    return stored;
  }

  void reserve() {
    const int64_t n = int64_t(stored_.size()), rows = batch_.num_tokens;
    const Layer& layer = *drafter_.layers[0];
    const int64_t requests = batch_.num_pieces, dim = layer.head_dim;
    width_ = int64_t(drafter_.num_layers) * (layer.k.out + layer.v.out);
    at_least(buffers_.pending, n * drafter_.fc.in), at_least(buffers_.features, n * size_);
    at_least(buffers_.keys_values, n * width_);
    at_least(buffers_.hidden, rows * size_), at_least(buffers_.out, rows * size_);
    at_least(buffers_.cos, rows * dim), at_least(buffers_.sin, rows * dim);
    at_least(buffers_.seen, requests * 2 * size_), at_least(buffers_.shifts, requests * 2 * size_);
    layers_ = LayersCall{buffers_.hidden.data(), buffers_.out.data(), buffers_.cos.data(), buffers_.sin.data(),
                         drafter_.layers, call_.keys, call_.values, nullptr, call_.num_slots, drafter_.num_layers, 1};
    works_ = layer_works(layers_, batch_, buffers_.layers);
  }

  void gather(int thread, int team) {
    const int64_t dim = drafter_.layers[0]->head_dim, block = drafter_.block_size, in = drafter_.fc.in;
    share(int64_t(stored_.size()), thread, team, [&](int64_t i) {
      std::copy_n(stored_[i].features, in, buffers_.pending.data() + i * in);
    });
    share(batch_.num_tokens, thread, team, [&](int64_t row) {
      const int64_t request = row / block, position = batch_.starts[request] + row % block;
      std::copy_n(call_.cos + position * dim, dim, buffers_.cos.data() + row * dim);
      std::copy_n(call_.sin + position * dim, dim, buffers_.sin.data() + row * dim);
      const bf16* from = row % block == 0 ? drafter_.embedding + call_.anchors[request] * size_ : drafter_.mask;
      bf16* to = buffers_.hidden.data() + row * size_;
      for (int64_t i = 0; i < size_; ++i) narrow(widen(from[i]) * drafter_.embedding_scale, to[i]);
    });
    share(batch_.num_pieces, thread, team, [&](int64_t r) {
      if (call_.num_pending[r] == 0) std::copy_n(call_.held[r], size_, call_.newest + r * size_);
    });
    barrier_.wait(team);
  }

  void store(int thread, int team) {
    const int64_t n = int64_t(stored_.size());
    bf16 *features = buffers_.features.data(), *keys_values = buffers_.keys_values.data();
    contexts_.each(drafter_.fc.panels(), [&](int64_t panel) {
      write_panel(drafter_.fc, buffers_.pending.data(), n, int(panel), features, size_);
    });
    barrier_.wait(team);
    share(n, thread, team, [&](int64_t i) {
      bf16* row = features + i * size_;
      rms_norm(row, drafter_.hidden_norm, int(size_), drafter_.eps, row);
      if (stored_[i].is_newest) std::copy_n(row, size_, call_.newest + stored_[i].request * size_);
    });
    barrier_.wait(team);
    const int k_panels = drafter_.layers[0]->k.panels(), v_panels = drafter_.layers[0]->v.panels();
    projections_.each(int64_t(drafter_.num_layers) * (k_panels + v_panels), [&](int64_t i) {
      const int64_t number = i / (k_panels + v_panels);
      const int panel = int(i % (k_panels + v_panels));
      const Layer& layer = *drafter_.layers[number];
      bf16* to = keys_values + number * (layer.k.out + layer.v.out);
      if (panel < k_panels) return write_panel(layer.k, features, n, panel, to, width_);
      write_panel(layer.v, features, n, panel - k_panels, to + layer.k.out, width_);
    });
    barrier_.wait(team);
    share(n * drafter_.num_layers, thread, team,
          [&](int64_t i) { store_token(stored_[i / drafter_.num_layers], i, i % drafter_.num_layers); });
    barrier_.wait(team);
  }

  // index: of the token and the layer among all of them.
  void store_token(const Stored& token, int64_t index, int64_t number) {
    const Layer& layer = *drafter_.layers[number];
    const int64_t dim = layer.head_dim;
    bf16* keys = buffers_.keys_values.data() + index * (layer.k.out + layer.v.out);
    for (int64_t head = 0; head < layer.num_kv_heads; ++head, keys += dim) {
      if (layer.k_norm != nullptr) rms_norm(keys, layer.k_norm, int(dim), layer.eps, keys);
      rotate(keys, call_.cos + token.position * dim, call_.sin + token.position * dim, int(dim));
      const int64_t at = (head * call_.num_slots + token.slot) * dim;
      std::copy_n(keys, dim, call_.keys[number] + at);
      std::copy_n(keys + layer.k.out, dim, call_.values[number] + at);
    }
  }

  // Adds to the block's inputs what the anchor and the newest feature say.
  void shift(int thread, int team) {
    const Linear &anchor = drafter_.anchor_shift, &mask = drafter_.mask_shift;
    bf16 *hidden = buffers_.hidden.data(), *seen = buffers_.seen.data(), *shifts = buffers_.shifts.data();
    const int64_t requests = batch_.num_pieces, block = drafter_.block_size;
    share(requests, thread, team, [&](int64_t r) {
      std::copy_n(hidden + r * block * size_, size_, seen + 2 * r * size_);
      std::copy_n(call_.newest + r * size_, size_, seen + (2 * r + 1) * size_);
    });
    barrier_.wait(team);
    shifts_.each(anchor.panels() + mask.panels(), [&](int64_t i) {
      const int panel = int(i) - anchor.panels();
      if (panel < 0) return write_panel(anchor, seen, requests, int(i), shifts, 2 * size_);
      write_panel(mask, seen, requests, panel, shifts + size_, 2 * size_);
    });
    barrier_.wait(team);
    share(batch_.num_tokens, thread, team, [&](int64_t row) {
      const bf16* own = shifts + (2 * (row / block) + (row % block > 0)) * size_;
      const bf16* slot = drafter_.slot_shift + row % block * size_;
      bf16* to = hidden + row * size_;
      for (int64_t i = 0; i < size_; ++i) narrow(rounded(widen(to[i]) + widen(own[i])) + widen(slot[i]), to[i]);
    });
    barrier_.wait(team);
  }

  const DraftCall& call_;
  const Drafter& drafter_;
  const Batch& batch_;
  DraftBuffers& buffers_;
  const int64_t size_;
  const std::vector<Stored> stored_;
  DraftTokens tokens_;
  std::vector<LayerWork> works_;
  LayersCall layers_{};
  int64_t width_ = 0;  // of the keys and values of all layers
  Barrier barrier_;
  Turns contexts_, projections_, shifts_;
};

inline void draft(const DraftCall& call, const Batch& batch) {
  static thread_local DraftBuffers buffers;
  DraftRound round(call, batch, buffers);
#pragma omp parallel num_threads(batch.num_threads)
  {
    static thread_local Scratch scratch;
    round.run(omp_get_thread_num(), omp_get_num_threads(), scratch);
  }
}

}  // namespace dspark
#endif
