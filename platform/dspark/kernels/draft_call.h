// What Python hands over of a drafter and of a round (`engine/fused_drafter.py`).
//
// Legend: R requests, G block size, N tokens to draft in all, V' draft vocabulary, r rank of W_1, d hidden size,
// m captured layers, K key/value heads, S slots, D head width, P positions that angles are known of.
#pragma once

#include "draw.h"
#include "layer.h"

#if DSPARK_BF16_DOT
namespace dspark {

// A drafter's weights; mirrored by `native.Drafter`. What it does not have is null. head, bias: V' rows of the
// target's head and of W_2; shifts: what the anchor and the newest feature add to slot 0 and to the others.
struct Drafter {
  Linear fc, anchor_shift, mask_shift, head, gate, bias;
  const bf16 *hidden_norm, *norm, *embedding, *mask, *slot_shift, *previous, *confidence;
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
  bf16* states;                // [N, d] h, where the caller draws by itself; else null
  float* confidences;          // [N] logits; null without that head
  int64_t num_slots;           // S
  Choice choice;               // lengths up to G
};

}  // namespace dspark
#endif
