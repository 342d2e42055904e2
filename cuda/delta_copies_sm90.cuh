// How a preparer of delta_sm90.cu has tiles copied: those of a chunk into its stage, and outputs of
// the chunk before away.
#pragma once
#include "delta_prepare_sm90.cuh"

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::load(
    const Maps& maps) const {
  shared.free[stage()].wait(parity() ^ 1);
  if (r == 0 && lane == 0) load_keys(maps);
  if (threadIdx.x % kGroup == kValueThread) change_place(maps.y);
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::load_keys(
    const Maps& maps) const {
  const Cursor& at = cursor();
  Barrier& loaded = shared.loaded[stage()];
  loaded.arrive_and_expect(2 * 2 * S::kQuery);
#pragma unroll 1
  for (int i = 0; i < S::kKeyTiles; i++) {
    load_tile(keys() + i * kTile, maps.k, i * 64, at.hq, at.token(), at.b, loaded);
    load_tile(queries() + i * kTile, maps.q, i * 64, at.hq, at.token(), at.b, loaded);
  }
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::change_place(
    const TensorMap& y_map) const {
  const Cursor& at = cursor();
  Place& place = shared.places[stage()];
  store(y_map);
  place.token = at.token(), place.h = at.h, place.b = at.b;
  place.column_block = at.column_block;
  place.open = left() == kChunk && at.chunk >= warm();
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::load_values(
    const TensorMap& v_map) const {
  if (threadIdx.x % kGroup != kValueThread) return;
  const Place& from = shared.places[stage()];
  Barrier& loaded = shared.values[stage()];
  wait_stores_read();
  loaded.arrive_and_expect(S::kKeepers * 2 * kTile);
#pragma unroll 1
  for (int i = 0; i < S::kKeepers; i++)
    load_tile(values() + i * kTile, v_map, from.column_block * S::kColumns + i * 64, from.h,
              from.token, from.b, loaded);
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::store(
    const TensorMap& y_map) const {
  const Place& to = shared.places[stage()];
  if (!to.open) return;
#pragma unroll 1
  for (int i = 0; i < S::kKeepers; i++)
    store_tile(y_map, values() + i * kTile, to.column_block * S::kColumns + i * 64, to.h, to.token,
               to.b);
  commit_stores();
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::store_last(
    const TensorMap& y_map) const {
  if (threadIdx.x % kGroup != kValueThread) return;
  Preparer turn = fresh();
#pragma unroll 1
  for (unsigned past = cursor().chunk; past < kStages; past += S::kPreparers) {
    shared.free[turn.stage()].wait(turn.parity() ^ 1);
    turn.store(y_map);
    shared.places[turn.stage()].open = 0;
    turn.at += S::kPreparers;
  }
  wait_stores();
}
