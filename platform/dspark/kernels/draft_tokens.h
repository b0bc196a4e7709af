// From the states of blocks to their tokens: the head, then slot by slot what the token before adds to its logits.
// Slow twin: `engine/paged_draft_runner.py:_draw`.
//
//     slot j    x_j = choose(U_j + W_2 v_j), v_j = W_1[x_{j-1}] or gated; confidence w [h_j; W_1[x_{j-1}]] + b
//
// Legend: see `draft_call.h`.
#pragma once

#include "draft_call.h"
#include "draw.h"

#if DSPARK_BF16_DOT
namespace dspark {

// The requests that draft a token in one slot, and what its threads share.
struct DraftSlot {
  std::vector<int32_t> requests;
  Turns gates, biases, choices;
};

// Kept from call to call.
struct TokenBuffers {
  std::vector<bf16> states, base, inputs, embedded, gated;
};

class DraftTokens {
 public:
  DraftTokens(const DraftCall& call, const Batch& batch, TokenBuffers& buffers)
      : call_(call), drafter_(*call.drafter), num_requests_(batch.num_pieces), buffers_(buffers),
        size_(drafter_.fc.out), rank_(drafter_.previous == nullptr ? 0 : drafter_.bias.in),
        slots_(num_requests_ ? *std::max_element(call.lengths, call.lengths + num_requests_) : 0) {
    first_.push_back(0), first_probs_.push_back(0);
    for (int r = 0; r < num_requests_; ++r) {
      const int length = call.lengths[r];
      for (int j = 0; j < length; ++j) rows_.push_back(r * drafter_.block_size + j), slots_[j].requests.push_back(r);
      first_.push_back(first_[r] + length);
      first_probs_.push_back(first_probs_[r] + (call.temperatures[r] > 0.0f ? length : 0));
    }
    const int64_t count = int64_t(rows_.size());
    states_ = call.states != nullptr ? call.states : at_least(buffers.states, count * size_);
    if (call.states == nullptr) at_least(buffers.base, count * drafter_.head.out);
    at_least(buffers.inputs, num_requests_ * (size_ + rank_));
    at_least(buffers.embedded, num_requests_ * rank_), at_least(buffers.gated, num_requests_ * rank_);
    bests_.resize(size_t(batch.num_threads) * num_requests_);
  }

  // A thread's part. blocks: what the last layer gave, [R G, d].
  void run(const bf16* blocks, int thread, int team, Barrier& barrier) {
    const int64_t count = int64_t(rows_.size());
    share(count, thread, team, [&](int64_t i) {
      rms_norm(blocks + rows_[i] * size_, drafter_.norm, int(size_), drafter_.eps, states_ + i * size_);
    });
    if (call_.states != nullptr) return;
    barrier.wait(team);
    heads_.each(drafter_.head.panels(), [&](int64_t panel) {
      write_panel(drafter_.head, states_, count, int(panel), buffers_.base.data(), drafter_.head.out);
    });
    barrier.wait(team);
    rank_ > 0 ? draw_in_turn(thread, team, barrier) : draw_at_once();
  }

 private:
  // U of columns first … of a token.
  void base_logits(int64_t token, int64_t first, int columns, float* out) const {
    const bf16* base = buffers_.base.data() + token * drafter_.head.out + first;
    for (int c = 0; c < columns; ++c) out[c] = widen(base[c]) * drafter_.logit_scale;
  }

  float* probs_of(int32_t r, int slot) const { return call_.probs + (first_probs_[r] + slot) * drafter_.head.out; }

  // Without a head that knows the tokens before a slot, all slots at once.
  void draw_at_once() {
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

  void draw_in_turn(int thread, int team, Barrier& barrier) {
    const auto begin_all = [&](int64_t i) { begin(slots_[0].requests[i], 0, i, call_.anchors[slots_[0].requests[i]]); };
    if (!slots_.empty()) share(int64_t(slots_[0].requests.size()), thread, team, begin_all);
    for (int j = 0; j < int(slots_.size()); ++j) {
      DraftSlot& slot = slots_[j];
      const int64_t count = int64_t(slot.requests.size());
      barrier.wait(team);
      if (drafter_.gate.weight != nullptr) {
        slot.gates.each(drafter_.gate.panels(), [&](int64_t panel) { gate_panel(count, int(panel)); });
        barrier.wait(team);
      }
      Best* bests = bests_.data() + int64_t(thread) * num_requests_;
      std::fill_n(bests, count, Best{});
      slot.biases.each(drafter_.bias.panels(), [&](int64_t panel) { add_biases(slot, j, int(panel), bests); });
      barrier.wait(team);
      slot.choices.each(count, [&](int64_t i) {
        Best best;
        for (int t = 0; t < team; ++t) best.meet(bests_[int64_t(t) * num_requests_ + i]);
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
  const int64_t num_requests_;
  TokenBuffers& buffers_;
  const int64_t size_, rank_;
  std::vector<DraftSlot> slots_;
  std::vector<int64_t> rows_, first_, first_probs_;  // [N] of the blocks; [R + 1] of a request's tokens, of its probs
  std::vector<Best> bests_;                          // [threads, R]
  bf16* states_ = nullptr;                           // [N, d]
  Turns heads_, choices_;
};

}  // namespace dspark
#endif
