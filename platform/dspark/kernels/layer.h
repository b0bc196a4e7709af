// A decoder layer of Llama's kind in one call: norm, projections, rotation, paged attention, gated feed-forward.
//
//     x = norm(h); q, k, v = W x; q, k = rotate(norm(q)), rotate(norm(k)); h += W_o attention(q, k, v)
//     x = norm(h); h += W_down (silu(W_gate x) * W_up x)
#pragma once

#include "attention.h"
#include "linear.h"

#if DSPARK_BF16_DOT
namespace dspark {

// Mirrored by `native.Layer`.
struct Layer {
  Linear q, k, v, o, gate, up, down;
  const bf16 *input_norm, *post_norm, *q_norm, *k_norm;  // [d], [d], [D], [D]; the latter two may be null
  float eps, scaling;
  int32_t num_heads, num_kv_heads, head_dim, window;
};

// What one call of a layer works on; mirrored by `native.LayerCall`.
struct LayerCall {
  const bf16* hidden;  // [B, d]
  bf16* out;           // [B, d]
  const void *cos, *sin;  // [B, D]
  bf16 *keys, *values;    // [K, S, D]
  int64_t num_slots;
  int32_t has_float_angles, unused;
};

// x / rms(x) * weight, rounded before the weight as the library's modules do.
inline void rms_norm(const bf16* x, const bf16* weight, int size, float eps, bf16* out) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int i = 0; i < size; ++i) squares += widen(x[i]) * widen(x[i]);
  const float scale = 1.0f / std::sqrt(squares / float(size) + eps);
#pragma GCC ivdep
  for (int i = 0; i < size; ++i) narrow(rounded(widen(x[i]) * scale) * widen(weight[i]), out[i]);
}

template <class Angle>
void rotate(bf16* x, const Angle* cos, const Angle* sin, int size) {
  const int half = size / 2;
#pragma GCC ivdep
  for (int i = 0; i < half; ++i) {
    const float first = widen(x[i]), second = widen(x[half + i]);
    narrow(first * widen(cos[i]) - second * widen(sin[i]), x[i]);
    narrow(second * widen(cos[half + i]) + first * widen(sin[half + i]), x[half + i]);
  }
}

// The buffers between a layer's parts, kept from call to call.
struct LayerBuffers {
  std::vector<bf16> normed, qkv, mixed, hidden, gated;
};

inline bf16* at_least(std::vector<bf16>& buffer, int64_t size) {
  if (int64_t(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

// Norms and rotates head `index % heads` of row `index / heads`: first the queries', then the keys'.
inline void turn_head(const Layer& layer, const LayerCall& call, bf16* qkv, int64_t width, int64_t index) {
  const int heads = layer.num_heads + layer.num_kv_heads, dim = layer.head_dim;
  const int64_t row = index / heads, head = index % heads;
  bf16* x = qkv + row * width + head * dim;
  const bf16* weight = head < layer.num_heads ? layer.q_norm : layer.k_norm;
  if (weight != nullptr) rms_norm(x, weight, dim, layer.eps, x);
  if (call.has_float_angles) {
    rotate(x, static_cast<const float*>(call.cos) + row * dim, static_cast<const float*>(call.sin) + row * dim, dim);
  } else {
    rotate(x, static_cast<const bf16*>(call.cos) + row * dim, static_cast<const bf16*>(call.sin) + row * dim, dim);
  }
}

inline Attention attention_of(const Layer& layer, const LayerCall& call, const bf16* qkv, int64_t width, bf16* out) {
  const int64_t dim = layer.head_dim;
  Attention a{};
  a.queries = qkv;
  a.new_keys = qkv + layer.q.out;
  a.new_values = qkv + layer.q.out + layer.k.out;
  a.keys = call.keys;
  a.values = call.values;
  a.out = out;
  a.query_token = a.key_token = a.value_token = width;
  a.query_head = a.key_head = a.value_head = dim;
  a.num_slots = call.num_slots;
  a.num_heads = layer.num_heads;
  a.num_kv_heads = layer.num_kv_heads;
  a.key_dim = a.value_dim = layer.head_dim;
  a.window = layer.window;
  a.is_bf16 = 1;
  a.scaling = layer.scaling;
  return a;
}

inline void run_layer(const Layer& layer, const LayerCall& call, const Batch& batch) {
  static thread_local LayerBuffers buffers;
  const int64_t rows = batch.num_tokens, size = layer.q.in, width = layer.q.out + layer.k.out + layer.v.out;
  bf16 *normed = at_least(buffers.normed, rows * size), *hidden = at_least(buffers.hidden, rows * size);
  bf16 *qkv = at_least(buffers.qkv, rows * width), *mixed = at_least(buffers.mixed, rows * layer.o.in);
  bf16* gated = at_least(buffers.gated, rows * layer.gate.out);
  const Attention a = attention_of(layer, call, qkv, width, mixed);
  const std::vector<Item> items = work_items(batch, a);
  const int q_panels = layer.q.panels(), k_panels = layer.k.panels(), v_panels = layer.v.panels();
  Turns projections, attentions, outputs, gates, downs;
  Barrier barrier;
#pragma omp parallel num_threads(batch.num_threads)
  {
    static thread_local Scratch scratch;
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    share(rows, thread, team, [&](int64_t row) {
      rms_norm(call.hidden + row * size, layer.input_norm, int(size), layer.eps, normed + row * size);
    });
    barrier.wait(team);
    projections.each(q_panels + k_panels + v_panels, [&](int64_t i) {
      int panel = int(i);
      if (panel < q_panels) return write_panel(layer.q, normed, rows, panel, qkv, width);
      panel -= q_panels;
      if (panel < k_panels) return write_panel(layer.k, normed, rows, panel, qkv + layer.q.out, width);
      write_panel(layer.v, normed, rows, panel - k_panels, qkv + layer.q.out + layer.k.out, width);
    });
    barrier.wait(team);
    share(rows * (layer.num_heads + layer.num_kv_heads), thread, team,
          [&](int64_t i) { turn_head(layer, call, qkv, width, i); });
    barrier.wait(team);
    share(rows * layer.num_kv_heads, thread, team, [&](int64_t i) { store_new<bf16>(batch, a, i); });
    barrier.wait(team);
    attend_items<bf16>(batch, a, items, team, attentions, scratch);
    barrier.wait(team);
    outputs.each(layer.o.panels(),
                 [&](int64_t panel) { add_panel(layer.o, mixed, rows, int(panel), call.hidden, hidden); });
    barrier.wait(team);
    share(rows, thread, team, [&](int64_t row) {
      rms_norm(hidden + row * size, layer.post_norm, int(size), layer.eps, normed + row * size);
    });
    barrier.wait(team);
    gates.each(layer.gate.panels(),
               [&](int64_t panel) { gated_panel(layer.gate, layer.up, normed, rows, int(panel), gated); });
    barrier.wait(team);
    downs.each(layer.down.panels(),
               [&](int64_t panel) { add_panel(layer.down, gated, rows, int(panel), hidden, call.out); });
  }
}

}  // namespace dspark
#endif
