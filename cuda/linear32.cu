// The linear rule in chunks of 32 tokens on tensor cores, for float32 and float16:
//
//   Y_i = d_i q_i S + sum_{j <= i} (q_i . k_j) D_ij v_j        S <- d_31 S + sum_j D_31,j k_j v_j^T
//
// with D_ij = beta_j gate_{j+1} ... gate_i and d_i = gate_0 ... gate_i (decay32.cuh). Products are
// split as products32.cuh says.
//
// A block walks through the chunks of one piece of a sequence for kCols columns of V of one head.
// Its warps have roles: some have q, k and v copied; some make decays, by turns; some keep the
// state, write it into shared memory before each chunk and advance it; the others make outputs, by
// turns. Stages of shared memory and the states go from hand to hand through barriers there.
//
// Where heads are too few to fill the chip, sequences are cut into pieces: states of pieces from
// zero (kOutput = false), a scan over pieces (scan_pieces), then outputs of all pieces at once.
#include "linear32_feed.cuh"

// Outputs by warp `warp` of those that make them: a part of every kTurns-th chunk.
//
// The state before a chunk comes once the chunk is there with its decays, and after the states
// before all earlier ones: so this warp waits for nothing else, and may skip phases.
template <class S>
__device__ __forceinline__ void make_outputs(const CallArgs& a, Shared<S>& shared, int warp,
                                             int lane) {
  using In = typename S::In;
  const Item& item = shared.item;  // read anew for every chunk
  const int rest = warp / S::kTurns, part = rest / S::kRowParts;
  const int own0 = part * S::kOutCols;
  Turn<S::kStages> stage;
  Turn<S::kSlots> state;
  stage.skip(warp % S::kTurns);
  state.skip(warp % S::kTurns);
  for (int c = warp % S::kTurns; c < item.chunks;
       c += S::kTurns, stage.skip(S::kTurns), state.skip(S::kTurns)) {
    const int block = (rest + part + c / S::kTurns) % S::kRowParts;  // the second is more work
    shared.state_made[state.slot].wait(state.parity);
    OutTiles<In, S::kProducts, S::kKeyTiles, S::kStateBox, S::kOutRows / 16, S::kOutCols / 8> tiles;
    tiles.make(shared.queries(stage.slot), shared.keys(stage.slot), shared.values(stage.slot),
               shared.states[state.slot], own0, shared.decays[stage.slot], block, lane,
               [&] { arrive(shared.state_free[state.slot], lane); });
    arrive(shared.free[stage.slot], lane);
    const float scale = static_cast<float>(a.scale);
    const int t = c * kChunk + block * kBlock + lane / 4, col = own0 + lane % 4 * 2;
    In* row = static_cast<In*>(a.y) + item.y + t * a.y_stride[1] + col;
#pragma unroll
    for (int i = 0; i < S::kOutRows / 8; i++, row += 8 * a.y_stride[1]) {
      if (t + 8 * i >= item.tokens) continue;
#pragma unroll
      for (int n = 0; n < S::kOutCols / 8; n++) {
        const float y0 = scale * tiles.y[i / 2][n][i % 2 * 2];
        const float y1 = scale * tiles.y[i / 2][n][i % 2 * 2 + 1];
        if (S::kWide > 1) {
          if (col + n * 8 < item.cols) store_pair(row + n * 8, y0, y1);
        } else {
          if (col + n * 8 < item.cols) row[n * 8] = Narrow<In>::from(y0);
          if (col + n * 8 + 1 < item.cols) row[n * 8 + 1] = Narrow<In>::from(y1);
        }
      }
    }
  }
}

// Zeros for tokens of no sequence, by the warps that make outputs.
template <class S>
__device__ __forceinline__ void clear_rest(const CallArgs& a, const Item& item) {
  using In = typename S::In;
  In* const y = static_cast<In*>(a.y) + item.y + item.tokens * a.y_stride[1];
  for (long long e = threadIdx.x; e < (a.T - item.stop) * item.cols; e += 32 * S::kOutWarps)
    y[e / item.cols * a.y_stride[1] + e % item.cols] = In{};
}

// The state, by warp `warp` of those that keep it: a part of it through all chunks.
template <class S>
__device__ __forceinline__ void keep_state(const CallArgs& a, const PieceArgs& pieces,
                                           Shared<S>& shared, int warp, int lane) {
  const Item& item = shared.item;
  const int row0 = warp % S::kStateRowParts * S::kStateRows;
  const int own0 = warp / S::kStateRowParts * S::kStateCols;
  float* const piece_state = pieces.states + (item.piece * a.N * a.H + item.nh) * (S::K * S::V);
  StateTiles<typename S::In, S::kProducts, S::kStateBox, S::kStateCols / 16, S::kStateRows / 8>
      tiles;
  tiles.clear_carry();
  tiles.each(lane, [&](float& s, int i, int j) {
    const long long row = row0 + i, col = item.col0 + own0 + j;
    s = 0;
    if (row >= S::K || own0 + j >= item.cols) return;
    if (S::kOutput && pieces.pieces > 1)
      s = piece_state[row * S::V + col];
    else if (S::kOutput && a.initial_state)
      s = static_cast<const float*>(
          a.initial_state)[item.n * a.state_stride[0] + item.h * a.state_stride[1] +
                           row * a.state_stride[2] + col * a.state_stride[3]];
  });
  const int chunks = item.chunks;
  double whole = 1;
  Turn<S::kStages> stage;
  Turn<S::kSlots> state;
  const auto publish = [&] {
    shared.state_free[state.slot].wait(state.parity ^ 1);
    tiles.publish(shared.states[state.slot], row0, own0, lane);
    arrive(shared.state_made[state.slot], lane);
    state.next();
  };
  for (int c = 0; c < chunks; c++, stage.next()) {
    const Decay& decay = shared.decays[stage.slot];
    shared.made[stage.slot].wait(stage.parity);
    tiles.advance(shared.keys(stage.slot), shared.values(stage.slot), row0, own0, decay, lane, [&] {
      if (S::kOutput) publish();
    });
    if (!S::kOutput) whole = bounded(whole * (double(decay.whole) + decay.whole_rest));
    arrive(shared.free[stage.slot], lane);
  }
  float* kept = nullptr;
  if (!S::kOutput)
    kept = pieces.states + (item.piece * a.N * a.H + item.nh) * (S::K * S::V);
  else if (a.state && item.piece == pieces.pieces - 1)
    kept = static_cast<float*>(a.state) + item.nh * (S::K * S::V);
  if (kept)
    tiles.each(lane, [&](float& s, int i, int j) {
      if (row0 + i < S::K && own0 + j < item.cols)
        kept[(row0 + i) * S::V + item.col0 + own0 + j] = s;
    });
  if (!S::kOutput && item.col0 == 0 && warp == 0 && lane == 0)
    pieces.decays[item.piece * a.N * a.H + item.nh] = whole;
}

template <class S>
__device__ __forceinline__ void set_up(Shared<S>& shared) {
  constexpr int kParts = S::kOutput ? S::kParts : 0;
  for (int i = 0; i < S::kStages; i++) {
    if (S::kWide == kBoxes)
      shared.loaded[i].init(1);
    else
      init_for_warps(shared.loaded[i], S::kCopyWarps);
    init_for_warps(shared.made[i], 1);
    init_for_warps(shared.free[i], S::kStateWarps + kParts);
  }
  for (int i = 0; i < S::kSlots; i++) {
    init_for_warps(shared.state_made[i], S::kStateWarps);
    init_for_warps(shared.state_free[i], S::kParts);
  }
#if !defined(SIMT_HOST) && __CUDA_ARCH__ >= 900
  if (S::kWide == kBoxes) fence_barriers();
#endif
}

// Zeros beside what is copied and written: nothing is ever written over them.
template <class S>
__device__ __forceinline__ void pad(Shared<S>& shared) {
  float* const rows = shared.stages[0];
  constexpr int kStages = S::kStages * S::kStage;
  for (int i = (S::kWide == kBoxes ? kStages : 0) + 4 * threadIdx.x; i < kStages + S::kStates;
       i += 4 * S::kThreads)
    *reinterpret_cast<Run<float, 4>*>(rows + i) = {};
}

template <class S, int kRegisters>
__device__ __forceinline__ void regroup() {
  if constexpr (S::kRegroups) set_registers<S::kAtLaunch, kRegisters>();
}

// grid: N * H * pieces * ceil(V / kCols) blocks, one piece fewer where only states are made.
// block: Shape::kThreads. The maps are for boxes of 32 tokens by 128 bytes.
template <class In, int K, int V, int kCols, int kTurns, int kStages, int kSlots, int kOutRows,
          int kOutCols, int kStateRows, int kStateCols, int kCopyWarps, int kDecayWarps,
          int kProducts, int kWide, bool kOutput>
__global__ void __launch_bounds__(
    Shape<In, K, V, kCols, kTurns, kStages, kSlots, kOutRows, kOutCols, kStateRows, kStateCols,
          kCopyWarps, kDecayWarps, kProducts, kWide, kOutput>::kThreads,
    1) linear32(const CallArgs a, const PieceArgs pieces, const __grid_constant__ TensorMap q_map,
                const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  using S = Shape<In, K, V, kCols, kTurns, kStages, kSlots, kOutRows, kOutCols, kStateRows,
                  kStateCols, kCopyWarps, kDecayWarps, kProducts, kWide, kOutput>;
  DYNAMIC_SHARED(unsigned char, raw);
  auto& shared = *reinterpret_cast<Shared<S>*>(raw);
  if (S::kPadded) pad(shared);
  if (threadIdx.x == 0) shared.item = find_item<S>(a, pieces);
  if (threadIdx.x == 32) set_up(shared);
#if defined(SIMT_HOST) || __CUDA_ARCH__ >= 900
  if (kWide == kBoxes && threadIdx.x == 64) {  // while others begin
    if (kOutput) prefetch_map(q_map);
    prefetch_map(k_map);
    prefetch_map(v_map);
  }
#endif
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kStateWarp = S::kOutWarps, kDecayWarp = kStateWarp + S::kStateWarps;
  constexpr int kCopyWarp = kDecayWarp + kDecayWarps;
  if (warp < kStateWarp) {
    regroup<S, S::kOutRegisters>();
    make_outputs(a, shared, warp, lane);
    const Item& item = shared.item;
    if (a.cu_seqlens && item.n == a.N - 1 && item.piece == pieces.pieces - 1)
      clear_rest<S>(a, item);
  } else if (warp < kDecayWarp) {
    regroup<S, S::kStateRegisters>();
    keep_state(a, pieces, shared, warp - kStateWarp, lane);
  } else if constexpr (S::kRegroups) {
    regroup<S, S::kOtherRegisters>();
    if (warp < kCopyWarp)
      make_decays(a, shared, warp - kDecayWarp, lane);
    else if (lane == 0)
      load(a, shared, q_map, k_map, v_map);
  } else if (warp < kCopyWarp) {
    make_decays(a, shared, warp - kDecayWarp, lane);
  } else if constexpr (kWide == kBoxes) {
    if (lane == 0) load(a, shared, q_map, k_map, v_map);
  } else {
    copy(a, shared, threadIdx.x - 32 * kCopyWarp);
  }
}

// States before each piece from those after each piece: S <- decay S + state, element by element.
__global__ void scan_pieces(const CallArgs a, const PieceArgs pieces, long long K, long long V) {
  const long long NH = a.N * a.H, size = NH * K * V;
  for (long long e = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; e < size;
       e += static_cast<long long>(gridDim.x) * blockDim.x) {
    const long long nh = e / (K * V), row = e / V % K, col = e % V;
    double s = 0;
    if (a.initial_state)
      s = static_cast<const float*>(
          a.initial_state)[nh / a.H * a.state_stride[0] + nh % a.H * a.state_stride[1] +
                           row * a.state_stride[2] + col * a.state_stride[3]];
    for (int p = 0; p < pieces.pieces; p++) {
      float* const at = pieces.states + p * size + e;
      const float own = p + 1 < pieces.pieces ? *at : 0.f;
      *at = static_cast<float>(s);
      if (p + 1 < pieces.pieces) s = s * pieces.decays[p * NH + nh] + own;
    }
  }
}
