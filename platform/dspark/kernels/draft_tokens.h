// From the states of blocks to their tokens: the head, then slot by slot what the token before adds to its logits.
// Slow twin: `engine/paged_draft_runner.py:_draw`.
//
//     slot j    x_j = choose(U_j + W_2 v_j), v_j = W_1[x_{j-1}] or gated; confidence w [h_j; W_1[x_{j-1}]] + b
//
// Legend: see `draft_call.h`.
#pragma once

#include "draft_call.h"

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
        choices_(call.choice, batch.num_pieces, batch.num_threads), slots_(choices_.num_slots()) {
    for (int r = 0; r < num_requests_; ++r) {
      for (int j = 0; choices_.has(r, j); ++j) {
        rows_.push_back(r * drafter_.block_size + j);
        slots_[j].requests.push_back(r);
      }
    }
    states_ = call.states != nullptr ? call.states : at_least(buffers.states, choices_.num_tokens() * size_);
    if (call.states == nullptr) at_least(buffers.base, choices_.num_tokens() * drafter_.head.out);
    at_least(buffers.inputs, num_requests_ * (size_ + rank_));
    at_least(buffers.embedded, num_requests_ * rank_), at_least(buffers.gated, num_requests_ * rank_);
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
    rank_ > 0 ? draw_in_turn(thread, team, barrier) : draw_at_once(thread);
  }

 private:
  // U of columns first … of a token.
  void base_logits(int64_t token, int64_t first, int columns, float* out) const {
    const bf16* base = buffers_.base.data() + token * drafter_.head.out + first;
    for (int c = 0; c < columns; ++c) out[c] = widen(base[c]) * drafter_.logit_scale;
  }

  // Without a head that knows the tokens before a slot, all slots at once.
  void draw_at_once(int thread) {
    tokens_.each(choices_.num_tokens(), [&](int64_t token) {
      const int32_t r = int32_t(rows_[token] / drafter_.block_size), slot = int32_t(rows_[token] % drafter_.block_size);
      choices_.forget(thread);
      for (int first = 0; first < drafter_.head.out; first += Choices::PART) {
        const int columns = std::min(Choices::PART, drafter_.head.out - first);
        choices_.look(thread, r, slot, first, columns,
                      [&](float* logits) { base_logits(token, first, columns, logits); });
      }
      choices_.settle(r, slot, thread, thread + 1);
      tell_confidence(token, nullptr);
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
      choices_.forget(thread);
      slot.biases.each(drafter_.bias.panels(), [&](int64_t panel) { add_biases(slot, j, int(panel), thread); });
      barrier.wait(team);
      slot.choices.each(count, [&](int64_t i) {
        const int32_t r = slot.requests[i];
        const int64_t id = choices_.settle(r, j, 0, team);
        if (!choices_.has(r, j + 1)) return;
        const std::vector<int32_t>& next = slots_[j + 1].requests;
        begin(r, j + 1, std::lower_bound(next.begin(), next.end(), r) - next.begin(), id);
      });
    }
  }

  // What slot `slot` of a request is told: the token before it. place: of the request among those that draft there.
  void begin(int32_t r, int slot, int64_t place, int64_t id) {
    const bf16* embedded = drafter_.previous + id * rank_;
    const int64_t token = choices_.token(r, slot);
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

  void add_biases(const DraftSlot& slot, int j, int panel, int thread) {
    const bf16* vectors = drafter_.gate.weight != nullptr ? buffers_.gated.data() : buffers_.embedded.data();
    each_row(drafter_.bias, vectors, int64_t(slot.requests.size()), panel,
             [&](int64_t row, int column, const float* sums, int columns) {
               const int32_t r = slot.requests[row];
               choices_.look(thread, r, j, column, columns, [&](float* logits) {
                 base_logits(choices_.token(r, j), column, columns, logits);
                 for (int c = 0; c < columns; ++c) logits[c] += rounded(sums[c]);
               });
             });
  }

  const DraftCall& call_;
  const Drafter& drafter_;
  const int64_t num_requests_;
  TokenBuffers& buffers_;
  const int64_t size_, rank_;
  Choices choices_;
  std::vector<DraftSlot> slots_;
  std::vector<int64_t> rows_;  // [N] of the blocks
  bf16* states_ = nullptr;     // [N, d]
  Turns heads_, tokens_;
};

}  // namespace dspark
#endif
