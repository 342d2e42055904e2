// What the eight warps of delta_grad_tokens share of one chunk. Warps r and 7 - r have 16 tokens
// from 16 r on: with pairs of tokens the first has the reads by q and the other one those by k,
// with rows of K each has every other part. Later tokens make more pairs: so each of the four
// schedulers, who take warps by turns, has as many.
#pragma once
#include "delta_grad_space.cuh"

constexpr int kTokenThreads = 256;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kLeanBlocks = 2;
#else
constexpr int kLeanBlocks = 3;  // that find room on a multiprocessor, if they are lean
#endif

template <int K, int V>
struct TokenShape : HeadShape<K, V> {
  using Head = HeadShape<K, V>;
  static constexpr int kValueRow = Head::kValues + kPad;
  static constexpr bool kLean = K == 64 && V == 64;         // few registers for each thread suffice
  static constexpr int kOwn = Head::kRowTiles > 2 ? 2 : 1;  // tiles of 16 rows of K a warp has
  static constexpr int kPieceTiles = 2 * kOwn;              // of a state, at a time
  static constexpr int kPieces = (Head::kRowTiles + kPieceTiles - 1) / kPieceTiles;
  static constexpr int kPiece = Head::kValueTiles * kPieceTiles * 32;  // uint4
  static constexpr int kKeys = kChunk * Head::kKeyRow, kRows = kChunk * kValueRow;
  static constexpr int kMisses = kRows > 2 * kChunk* kChunk ? kRows : 2 * kChunk * kChunk;
  static constexpr int kNumbers = 2 * kKeys + 2 * kRows + kMisses;  // 16-bit ones
};

struct TokenSums {
  float beta[kChunk];
  float columns[2 * kBlocks][kChunk];      // by side and r
  float edge[2][kChunk], last[2][kChunk];  // x_i S d_i and k_j G e_j, by halves of K
  float along[kChunk];                     // e_j . de_j
  float corner[2 * kBlocks];               // <S, G>, by warp
  float written[kChunk];                   // of the gates' gradients, of what G has of writes
};

template <int K, int V>
constexpr int kTokenBytes = 2 * TokenShape<K, V>::kNumbers + 16 * TokenShape<K, V>::kPiece +
                            static_cast<int>(sizeof(Decay) + sizeof(TokenSums));

// Where a lane's numbers lie in a block as mma leaves a sum.
struct TokenWarp {
  int warp, lane;

  __device__ __forceinline__ int r() const { return warp % kBlocks ^ warp / kBlocks * 3; }
  __device__ __forceinline__ int side() const { return warp / kBlocks; }
  __device__ __forceinline__ int row(int i) const {
    return r() * kBlock + lane / 4 + i % 4 / 2 * 8;
  }
  __device__ __forceinline__ int col(int tile, int i) const {
    return tile * 8 + lane % 4 * 2 + i % 2;
  }
};

// Rows of e into shared memory.
template <class S>
__device__ __forceinline__ void copy_misses(unsigned short* to, const unsigned short* from) {
  constexpr int kVectors = S::kValues / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < kChunk * kVectors; i += kTokenThreads)
    cp_async<16>(to + i / kVectors * S::kValueRow + i % kVectors * 8, from + i * 8);
}
