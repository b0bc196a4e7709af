// Decoder layers of Llama's kind in one call: norm, projections, rotation, paged attention, gated feed-forward.
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

// L layers, each of which works on what the one before it gives; mirrored by `native.LayersCall`.
struct LayersCall {
  const bf16* hidden;  // [B, d]
  bf16* out;           // [B, d]
  const void *cos, *sin;  // [B, D]
  const Layer* const* layers;        // [L]
  bf16 *const *keys, *const *values;  // [L] addresses of [K, S, D]
  bf16* const* outs;                  // [L] where a layer's own output is to be kept, [B, d]; may be null, as may each
  int64_t num_slots;
  int32_t num_layers, has_float_angles;
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

// The buffers between the parts of a layer, and between layers; kept from call to call.
struct LayerBuffers {
  std::vector<bf16> normed, qkv, mixed, hidden, gated, between;
};

template <class T>
T* at_least(std::vector<T>& buffer, int64_t size) {
  if (int64_t(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

// Norms and rotates head `index % heads` of row `index / heads`: first the queries', then the keys'.
inline void turn_head(const Layer& layer, const LayersCall& call, bf16* qkv, int64_t width, int64_t index) {
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

inline Attention attention_of(const LayersCall& call, int number, const bf16* qkv, int64_t width, bf16* out) {
  const Layer& layer = *call.layers[number];
  const int64_t dim = layer.head_dim;
  Attention a{};
  a.queries = qkv;
  a.new_keys = qkv + layer.q.out;
  a.new_values = qkv + layer.q.out + layer.k.out;
  a.keys = call.keys[number];
  a.values = call.values[number];
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

// A layer of a call: what its threads share. items: its own, or those of a layer before it with the same attention.
struct LayerWork {
  const Layer* layer;
  const bf16* from;
  bf16* to;
  int64_t width;  // of a row's queries, keys and values together
  Attention attention;
  std::vector<Item> own_items;
  const std::vector<Item>* items;
  Turns projections, attentions, outputs, gates, downs;
};

// A thread's part in a layer, whose projections are given buffers.normed; `barrier` is where the threads meet.
inline void run_normed(LayerWork& work, const LayersCall& call, const Batch& batch, LayerBuffers& buffers, int thread,
                       int team, Barrier& barrier, Scratch& scratch) {
  const Layer& layer = *work.layer;
  const int64_t rows = batch.num_tokens, size = layer.o.out, width = work.width;
  bf16 *normed = buffers.normed.data(), *hidden = buffers.hidden.data(), *qkv = buffers.qkv.data();
  bf16 *mixed = buffers.mixed.data(), *gated = buffers.gated.data();
  const int q_panels = layer.q.panels(), k_panels = layer.k.panels(), v_panels = layer.v.panels();
  work.projections.each(q_panels + k_panels + v_panels, [&](int64_t i) {
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
  share(rows * layer.num_kv_heads, thread, team, [&](int64_t i) { store_new<bf16>(batch, work.attention, i); });
  barrier.wait(team);
  attend_items<bf16>(batch, work.attention, *work.items, team, work.attentions, scratch);
  barrier.wait(team);
  work.outputs.each(layer.o.panels(),
                    [&](int64_t panel) { add_panel(layer.o, mixed, rows, int(panel), work.from, hidden); });
  barrier.wait(team);
  share(rows, thread, team, [&](int64_t row) {
    rms_norm(hidden + row * size, layer.post_norm, int(size), layer.eps, normed + row * size);
  });
  barrier.wait(team);
  work.gates.each(layer.gate.panels(),
                  [&](int64_t panel) { gated_panel(layer.gate, layer.up, normed, rows, int(panel), gated); });
  barrier.wait(team);
  work.downs.each(layer.down.panels(),
                  [&](int64_t panel) { add_panel(layer.down, gated, rows, int(panel), hidden, work.to); });
  barrier.wait(team);
}

// A thread's part in a layer that norms what it is given.
inline void run_part(LayerWork& work, const LayersCall& call, const Batch& batch, LayerBuffers& buffers, int thread,
                     int team, Barrier& barrier, Scratch& scratch) {
  const Layer& layer = *work.layer;
  const int64_t size = layer.q.in;
  share(batch.num_tokens, thread, team, [&](int64_t row) {
    rms_norm(work.from + row * size, layer.input_norm, int(size), layer.eps, buffers.normed.data() + row * size);
  });
  barrier.wait(team);
  run_normed(work, call, batch, buffers, thread, team, barrier, scratch);
}

inline bool have_equal_items(const Attention& a, const Attention& b) {
  return a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads && a.window == b.window;
}

// Room for a layer of so many rows.
inline void reserve_layer(const Layer& layer, int64_t rows, LayerBuffers& buffers) {
  const int64_t width = layer.q.out + layer.k.out + layer.v.out;
  at_least(buffers.normed, rows * layer.q.in), at_least(buffers.hidden, rows * layer.o.out);
  at_least(buffers.between, rows * layer.o.out), at_least(buffers.qkv, rows * width);
  at_least(buffers.mixed, rows * layer.o.in), at_least(buffers.gated, rows * layer.gate.out);
}

// What the layers of a call are given, give and share, the buffers being made large enough for them.
inline std::vector<LayerWork> layer_works(const LayersCall& call, const Batch& batch, LayerBuffers& buffers) {
  for (int i = 0; i < call.num_layers; ++i) reserve_layer(*call.layers[i], batch.num_tokens, buffers);
  std::vector<LayerWork> works(call.num_layers);
  for (int i = 0; i < call.num_layers; ++i) {
    LayerWork& work = works[i];
    const Layer& layer = *(work.layer = call.layers[i]);
    work.width = layer.q.out + layer.k.out + layer.v.out;
    work.from = i == 0 ? call.hidden : works[i - 1].to;
    // The last one gives what is asked for.
    work.to = (call.num_layers - 1 - i) % 2 == 0 ? call.out : buffers.between.data();
    if (call.outs != nullptr && call.outs[i] != nullptr) work.to = call.outs[i];
  }
  for (int i = 0; i < call.num_layers; ++i) {
    LayerWork& work = works[i];
    work.attention = attention_of(call, i, buffers.qkv.data(), work.width, buffers.mixed.data());
    const bool is_as_before = i > 0 && have_equal_items(work.attention, works[i - 1].attention);
    if (!is_as_before) work.own_items = work_items(batch, work.attention);
    work.items = is_as_before ? works[i - 1].items : &work.own_items;
  }
  return works;
}

// All layers in one parallel region: waking threads for each would take as long as a layer of a few rows.
inline void run_layers(const LayersCall& call, const Batch& batch) {
  static thread_local LayerBuffers buffers;
  std::vector<LayerWork> works = layer_works(call, batch, buffers);
  Barrier barrier;
  LayerBuffers& shared = buffers;  // in a region each thread would see its own
#pragma omp parallel num_threads(batch.num_threads)
  {
    static thread_local Scratch scratch;
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    for (LayerWork& work : works) run_part(work, call, batch, shared, thread, team, barrier, scratch);
  }
}

}  // namespace dspark
#endif
