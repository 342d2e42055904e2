// What the three kernels of delta_grad.cu leave in global memory for each other, and where.
#pragma once
#include "chunk.cuh"
#include "grad.cuh"
#include "inverse.cuh"
#include "slots.cuh"

constexpr int kPad = 8;  // 16-bit numbers after each row in shared memory: rows in different banks

struct ChunkWeights {
  float from_start[kChunk];  // gates 0 to t
  float to_end[kChunk];      // gates t + 1 to 63, and beta of t
  float whole;               // all gates
  int strained;              // whether keys are much alike: more digits are needed
  int padding[2];
};

// Of one chunk of one head, before any state is known: lower blocks of 16 x 16 as right factors,
// one uint4 a lane. The inverse is that of I + A, A_ij = D_ij beta_j k_i . k_j for j < i.
struct alignas(16) Prepared {
  uint4 transposed[2][kLowerBlocks][32];  // the inverse, and the bits that follow
  ChunkWeights weights;
  uint4 inverse[2][kLowerBlocks][32];
  uint4 scores[kLowerBlocks][32];  // D_ij beta_j q_i . k_j
};
constexpr int kForwardBytes = 2 * kLowerBlocks * 512 + static_cast<int>(sizeof(ChunkWeights));
constexpr int kBackBytes = 3 * kLowerBlocks * 512 + static_cast<int>(sizeof(ChunkWeights));

// Chunks of all sequences lie one after the other in slots; of each slot there is one entry a head.
struct SpaceArgs {
  Prepared* prepared;
  unsigned short* misses;  // rows of e = v - k^T R, as many as tokens in a chunk, padded
  uint4* states;           // before each chunk, in transposed blocks as right factors
  uint4* late;             // gradients of the states after each chunk, likewise
  long long slots;
};

using SlotChunk = ChunkInSlot<kChunk>;

// Sizes of one head, padded to whole tiles.
template <int K, int V>
struct HeadShape {
  static constexpr int kRowTiles = (K + 15) / 16, kKeyRow = kRowTiles * 16 + kPad;
  static constexpr int kValueTiles = (V + 15) / 16, kValues = kValueTiles * 16;
  static constexpr int kStateBlocks = kRowTiles * kValueTiles;
};

// Where the rows of one head begin, of an array with strides over (B, T, heads).
__device__ __forceinline__ const unsigned short* head_rows(const void* x,
                                                           const long long (&stride)[3],
                                                           long long b, long long t, long long h) {
  return static_cast<const unsigned short*>(x) + b * stride[0] + t * stride[1] + h * stride[2];
}

// Gates and betas of tokens 2 lane and 2 lane + 1 of a chunk: gate 1 and beta 0 past its end.
__device__ __forceinline__ void load_gates(float (&gate)[2], float (&beta)[2], const CallArgs& a,
                                           const SlotChunk& chunk, long long h, int lane) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    gate[i] = 1, beta[i] = 0;
    if (2 * lane + i >= chunk.tokens) continue;
    const long long t = chunk.first + 2 * lane + i;
    Scalar<bfloat16_t> x;
    x.load(a.gate, chunk.b * a.gate_stride[0] + t * a.gate_stride[1] + h * a.gate_stride[2],
           a.gate_kind);
    gate[i] = nan_if_infinite(x.value<float>(a.gate_kind));
    x.load(a.beta, chunk.b * a.beta_stride[0] + t * a.beta_stride[1] + h * a.beta_stride[2],
           a.beta_kind);
    beta[i] = nan_if_infinite(x.value<float>(a.beta_kind));
  }
}

template <bool kWild>
__device__ __forceinline__ void decays_between(float (&w)[2][4], const Decay& decay, int r, int c,
                                               int lane) {
  float head[2];
#pragma unroll
  for (int half = 0; half < 2; half++)
    head[half] =
        times<kWild>(decay.between[r][c], decay.in_block[r * kBlock + lane / 4 + half * 8]);
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
    const float2 tail =
        *reinterpret_cast<const float2*>(decay.to_block_end + c * kBlock + tile * 8 + lane % 4 * 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      w[tile][2 * half] = times<kWild>(head[half], tail.x);
      w[tile][2 * half + 1] = times<kWild>(head[half], tail.y);
    }
  }
}
// gate_{j+1} ... gate_i (and beta_j, if it is in `decay`) of block c of row r of blocks, c <= r, as
// mma leaves a sum. Above the diagonal: 0.
__device__ __forceinline__ void decays_of_block(float (&w)[2][4], const Decay& decay, int r, int c,
                                                int lane) {
  if (c == r) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 two = *reinterpret_cast<const float2*>(
          &decay.diagonal[r][lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2]);
      w[i / 4][i % 4] = two.x, w[i / 4][i % 4 + 1] = two.y;
    }
  } else if (__builtin_expect(decay.wild, 0)) {
    decays_between<true>(w, decay, r, c, lane);
  } else {
    decays_between<false>(w, decay, r, c, lane);
  }
}
