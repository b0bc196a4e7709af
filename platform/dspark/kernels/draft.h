// A drafter's whole round in one call: the context it is told of, its block, and the tokens of the block one by one.
// Slow twin: `engine/paged_draft_runner.py`.
//
//     context   C = norm(W_c pending); of each layer k = rotate(norm(W_k C)), v = W_v C, into pages
//     block     h_0 … h_{G-1} = norm(layers(embed(anchor), mask, mask, …)), each slot seeing context and block
//     slot j    x_j = choose(U_j + W_2 v_j), v_j = W_1[x_{j-1}] or gated; confidence w [h_j; W_1[x_{j-1}]] + b
//
// Legend: R requests, G block size, n context tokens to store, N tokens to draft in all, V' draft vocabulary, r rank of
// W_1, d hidden size, m captured layers, D head width, P positions that angles are known of.
#pragma once

#include "draw.h"
#include "layer.h"

#if DSPARK_BF16_DOT
namespace dspark {

// A drafter's weights; mirrored by `native.Drafter`. What it does not have is null. head, bias: V' rows of W_2 and of
// the target's head; shifts: what the anchor and the newest feature add to slot 0 and to the others.
struct Drafter {
  Linear fc, anchor_shift, mask_shift, head, gate, bias;
  const bf16 *hidden_norm, *norm, *embedding, *mask, *slot_shift, *previous, *confidence;
  const int64_t* d2t;  // [V']
  const Layer* const* layers;
  float eps, embedding_scale, logit_scale, confidence_bias;
  int32_t num_layers, block_size, is_confidence_told_ids, unused;
};

// A round; mirrored by `native.DraftCall`. Request after request; the block of one starts where its context ends.
struct DraftCall {
  const Drafter* drafter;
  bf16 *const *keys, *const *values;  // of each layer, [K, S, D]
  const float *cos, *sin;             // [P, D]
  const bf16* const* parts;           // features to store, [rows, m d] each, in the order of the requests
  const int32_t* part_rows;
  const int32_t* num_pending;  // [R] of these rows
  const bf16* const* held;     // [R] the newest feature of a request that has none to store; may be null for others
  bf16* newest;                // [R, d] the newest feature of each
  const int64_t* anchors;      // [R] ids
  const int32_t* lengths;      // [R] tokens to draft, up to G
  const float* temperatures;   // [R] 0: the most likely token
  const float* uniforms;       // [N] what tokens are drawn with
  bf16* states;                // [N, d] h, where the caller draws by itself; else null
  int64_t *columns, *token_ids;  // [N] draft ids and target ids
  float* probs;                  // [N of the requests with a temperature, V'] what they were drawn from
  float* confidences;            // [N] logits; null without that head
  int64_t num_slots;             // S
  int32_t num_parts, unused;
};

// Kept from call to call.
struct DraftBuffers {
  std::vector<bf16> pending, features, keys_values, hidden, seen, shifts, out, states, base, inputs, embedded, gated;
  std::vector<float> cos, sin;
  LayerBuffers layers;
};

// Where a token to store comes from and goes to.
struct Stored {
  const bf16* features;
  int64_t position, slot;
  int32_t request;
  bool is_newest;
};

// The requests that draft a token in one slot, and what its threads share.
struct DraftSlot {
  std::vector<int32_t> requests;
  Turns gates, biases, choices;
};

class DraftRound {
 public:
  DraftRound(const DraftCall& call, const Batch& batch, DraftBuffers& buffers)
      : call_(call), drafter_(*call.drafter), batch_(batch), buffers_(buffers), size_(drafter_.fc.out),
        rank_(drafter_.previous == nullptr ? 0 : drafter_.bias.in), stored_(tokens_to_store(call, batch)),
        slots_(batch.num_pieces ? *std::max_element(call.lengths, call.lengths + batch.num_pieces) : 0) {
    first_.push_back(0), first_probs_.push_back(0);
    for (int r = 0; r < batch.num_pieces; ++r) {
      const int length = call.lengths[r];
      for (int j = 0; j < length; ++j) rows_.push_back(r * drafter_.block_size + j);
      first_.push_back(first_[r] + length);
      first_probs_.push_back(first_probs_[r] + (call.temperatures[r] > 0.0f ? length : 0));
    }
    for (int j = 0; j < int(slots_.size()); ++j) {
      for (int r = 0; r < batch.num_pieces; ++r) {
        if (call.lengths[r] > j) slots_[j].requests.push_back(r);
      }
    }
    reserve();
  }

  // A thread's part.
  void run(int thread, int team, Scratch& scratch) {
    gather(thread, team);
    if (!stored_.empty()) store(thread, team);
    if (drafter_.anchor_shift.weight != nullptr) shift(thread, team);
    for (LayerWork& work : works_) run_part(work, layers_, batch_, buffers_.layers, thread, team, barrier_, scratch);
    share(int64_t(rows_.size()), thread, team, [&](int64_t i) {
      rms_norm(buffers_.out.data() + rows_[i] * size_, drafter_.norm, int(size_), drafter_.eps, states_ + i * size_);
    });
    if (call_.states != nullptr) return;
    barrier_.wait(team);
    heads_.each(drafter_.head.panels(), [&](int64_t panel) {
      write_panel(drafter_.head, states_, int64_t(rows_.size()), int(panel), buffers_.base.data(), drafter_.head.out);
    });
    barrier_.wait(team);
    rank_ > 0 ? draw_in_turn(thread, team) : draw_at_once(team);
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
    const int64_t n = int64_t(stored_.size()), rows = batch_.num_tokens, drawn = int64_t(rows_.size());
    const Layer& layer = *drafter_.layers[0];
    const int64_t requests = batch_.num_pieces, dim = layer.head_dim;
    width_ = int64_t(drafter_.num_layers) * (layer.k.out + layer.v.out);
    at_least(buffers_.pending, n * drafter_.fc.in), at_least(buffers_.features, n * size_);
    at_least(buffers_.keys_values, n * width_);
    at_least(buffers_.hidden, rows * size_), at_least(buffers_.out, rows * size_);
    at_least(buffers_.cos, rows * dim), at_least(buffers_.sin, rows * dim);
    at_least(buffers_.seen, requests * 2 * size_), at_least(buffers_.shifts, requests * 2 * size_);
    states_ = call_.states != nullptr ? call_.states : at_least(buffers_.states, drawn * size_);
    if (call_.states == nullptr) at_least(buffers_.base, drawn * drafter_.head.out);
    at_least(buffers_.inputs, requests * (size_ + rank_));
    at_least(buffers_.embedded, requests * rank_), at_least(buffers_.gated, requests * rank_);
    bests_.resize(size_t(batch_.num_threads) * requests);
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

  // U of columns first … of a token.
  void base_logits(int64_t token, int64_t first, int columns, float* out) const {
    const bf16* base = buffers_.base.data() + token * drafter_.head.out + first;
    for (int c = 0; c < columns; ++c) out[c] = widen(base[c]) * drafter_.logit_scale;
  }

  float* probs_of(int32_t r, int slot) const { return call_.probs + (first_probs_[r] + slot) * drafter_.head.out; }

  // Without a head that knows the tokens before a slot, all slots at once.
  void draw_at_once(int team) {
    constexpr int PART = 512;
    choices_.each(int64_t(rows_.size()), [&](int64_t token) {
      const int32_t r = int32_t(rows_[token] / drafter_.block_size), slot = int32_t(token - first_[r]);
      const bool is_sampled = call_.temperatures[r] > 0.0f;
      Best best;
      for (int first = 0; first < drafter_.head.out; first += PART) {
        const int columns = std::min(PART, drafter_.head.out - first);
        float part[PART];
        float* logits = is_sampled ? probs_of(r, slot) + first : part;
        base_logits(token, first, columns, logits);
        if (!is_sampled) look_at(best, logits, columns, first);
      }
      tell_confidence(token, nullptr);
      settle(r, slot, best);
    });
  }

  void draw_in_turn(int thread, int team) {
    const auto begin_all = [&](int64_t i) { begin(slots_[0].requests[i], 0, i, call_.anchors[slots_[0].requests[i]]); };
    if (!slots_.empty()) share(int64_t(slots_[0].requests.size()), thread, team, begin_all);
    for (int j = 0; j < int(slots_.size()); ++j) {
      DraftSlot& slot = slots_[j];
      const int64_t count = int64_t(slot.requests.size());
      barrier_.wait(team);
      if (drafter_.gate.weight != nullptr) {
        slot.gates.each(drafter_.gate.panels(), [&](int64_t panel) { gate_panel(count, int(panel)); });
        barrier_.wait(team);
      }
      Best* bests = bests_.data() + int64_t(thread) * batch_.num_pieces;
      std::fill_n(bests, count, Best{});
      slot.biases.each(drafter_.bias.panels(), [&](int64_t panel) { add_biases(slot, j, int(panel), bests); });
      barrier_.wait(team);
      slot.choices.each(count, [&](int64_t i) {
        Best best;
        for (int t = 0; t < team; ++t) best.meet(bests_[int64_t(t) * batch_.num_pieces + i]);
        const int32_t r = slot.requests[i];
        const int64_t id = settle(r, j, best);
        if (call_.lengths[r] <= j + 1) return;
        const std::vector<int32_t>& next = slots_[j + 1].requests;
        begin(r, j + 1, std::lower_bound(next.begin(), next.end(), r) - next.begin(), id);
      });
    }
  }

  // What slot `slot` of a request is told: the token before it. place: of the request among those that draft there.
  void begin(int32_t r, int slot, int64_t place, int64_t id) {
    const bf16* embedded = drafter_.previous + id * rank_;
    const int64_t token = first_[r] + slot;
    std::copy_n(embedded, rank_, buffers_.embedded.data() + place * rank_);
    if (drafter_.gate.weight != nullptr) {
      bf16* inputs = buffers_.inputs.data() + place * (size_ + rank_);
      std::copy_n(states_ + token * size_, size_, inputs);
      std::copy_n(embedded, rank_, inputs + size_);
    }
    tell_confidence(token, embedded);
  }

  void tell_confidence(int64_t token, const bf16* embedded) {
    if (call_.confidences == nullptr) return;
    const bf16 *h = states_ + token * size_, *weight = drafter_.confidence;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size_; ++i) sum += widen(h[i]) * widen(weight[i]);
    const int64_t told = drafter_.is_confidence_told_ids ? rank_ : 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < told; ++i) sum += widen(embedded[i]) * widen(weight[size_ + i]);
    call_.confidences[token] = rounded(sum + drafter_.confidence_bias);
  }

  // v = sigmoid(W_g [h; e] + b_g) * e
  void gate_panel(int64_t count, int panel) {
    each_row(drafter_.gate, buffers_.inputs.data(), count, panel,
             [&](int64_t row, int column, const float* sums, int columns) {
               const int64_t at = row * rank_ + column;
               for (int c = 0; c < columns; ++c) {
                 const float open = rounded(1.0f / (1.0f + exponential(-rounded(sums[c]))));
                 narrow(open * widen(buffers_.embedded[at + c]), buffers_.gated[at + c]);
               }
             });
  }

  // Logits of a panel's columns: kept where a token is drawn from all, else only the largest.
  void add_biases(const DraftSlot& slot, int j, int panel, Best* bests) {
    const bf16* vectors = drafter_.gate.weight != nullptr ? buffers_.gated.data() : buffers_.embedded.data();
    each_row(drafter_.bias, vectors, int64_t(slot.requests.size()), panel,
             [&](int64_t row, int column, const float* sums, int columns) {
               const int32_t r = slot.requests[row];
               const bool is_sampled = call_.temperatures[r] > 0.0f;
               float part[PANEL];
               float* logits = is_sampled ? probs_of(r, j) + column : part;
               base_logits(first_[r] + j, column, columns, logits);
               for (int c = 0; c < columns; ++c) logits[c] += rounded(sums[c]);
               if (!is_sampled) look_at(bests[row], logits, columns, column);
             });
  }

  // The target id of a request's token, which is drawn now where it is not the most likely one.
  int64_t settle(int32_t r, int slot, const Best& best) {
    const int64_t token = first_[r] + slot;
    int64_t column = best.column;
    if (call_.temperatures[r] > 0.0f) {
      float* row = probs_of(r, slot);
      to_probabilities(row, drafter_.head.out, call_.temperatures[r]);
      column = invert(row, drafter_.head.out, double(call_.uniforms[token]));
    }
    call_.columns[token] = column;
    return call_.token_ids[token] = drafter_.d2t[column];
  }

  const DraftCall& call_;
  const Drafter& drafter_;
  const Batch& batch_;
  DraftBuffers& buffers_;
  const int64_t size_, rank_;
  const std::vector<Stored> stored_;
  std::vector<DraftSlot> slots_;
  std::vector<int64_t> rows_, first_, first_probs_;  // [N] of the block; [R + 1] of a request's tokens, of its probs
  std::vector<Best> bests_;  // [threads, R]
  std::vector<LayerWork> works_;
  LayersCall layers_{};
  int64_t width_ = 0;  // of the keys and values of all layers
  bf16* states_ = nullptr;
  Barrier barrier_;
  Turns contexts_, projections_, shifts_, heads_, choices_;
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
