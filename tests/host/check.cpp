// Follows every access to memory of an instrumented build. g++ -fsanitize=thread turns each access
// into a call of __tsan_*, which are defined here instead of taken from its own runtime.
//
// Races are found by vector clocks (as in FastTrack, Flanagan and Freund 2009): two accesses to the
// same memory, one of them a write, must have a chain of barriers, __syncwarps or atomics between
// them, in whatever order the threads happened to run. Shuffles and votes order nothing, as CUDA
// has it. An atomic is taken to publish what its thread did before and to see what earlier atomics
// on the same address published: a missing __threadfence around it is not found.
#include <algorithm>
#include <set>
#include <unordered_map>

#include "runtime.h"

extern "C" {  // made by the linker: the library itself, and its variables without initial values
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char __bss_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
}

namespace simt::check {
bool on = false;

namespace {
using Clock = unsigned;
constexpr size_t kGrain = 2;  // bytes that one cell stands for; threads may share no smaller piece

struct Access {  // clock = 0: none
  unsigned pc, thread, block;
  Clock clock;
};
struct Cell {
  Access writer, reader;  // the last ones
  unsigned readers;       // if not 0: when each thread of reader.block last read
  bool pending;           // a cp.async by the writer is under way
};
struct Memory {  // with a cell for every two bytes, or without cells where nobody can write
  std::string name;
  uintptr_t begin, end;
  bool writable, shared;
  std::vector<Cell> cells;

  bool holds(uintptr_t p, size_t bytes) const { return p >= begin && p < end && bytes <= end - p; }
  size_t distance(uintptr_t p) const { return p < begin ? begin - p : p >= end ? p - end : 0; }
};
struct Published {  // by the atomics on one address
  unsigned block = 0;
  std::vector<Clock> clocks;  // of that block
  std::set<unsigned> blocks;
};

struct State {
  unsigned threads = 0, block = 0;
  bool uninitialised = false, global = false;
  uintptr_t stacks = 0, stacks_end = 0;
  std::vector<Clock> clocks;  // [thread][other]: up to when the thread knows of the other
  std::vector<Clock> barriers[16];
  std::vector<Memory> memories;    // 0 dynamic, 1 static shared memory, then the arrays
  size_t last = 0;                 // where the last access was
  std::vector<Clock> read_clocks;  // rows of `threads`
  std::vector<unsigned> free_rows;
  std::unordered_map<uintptr_t, Published> atomics;
  std::set<unsigned> known_blocks;  // ordered before this one by atomics
};
State& s = *new State;

Clock* clocks_of(unsigned thread) { return &s.clocks[size_t(thread) * s.threads]; }

void join(Clock* into, const Clock* from) {
  for (unsigned i = 0; i < s.threads; i++) into[i] = std::max(into[i], from[i]);
}

bool ordered(const Access& a, const Clock* mine) {
  if (!a.clock) return true;
  if (a.block != s.block) return s.known_blocks.count(a.block);
  return mine[a.thread] >= a.clock;
}

std::string bytes_of(const Memory& m, uintptr_t p, size_t bytes) {
  return std::to_string(bytes) + " bytes at offset " + std::to_string(p - m.begin) + " of " +
         m.name;
}

[[noreturn]] void race(const Memory& m, uintptr_t p, size_t bytes, bool write, uintptr_t pc,
                       const Access& other, bool other_wrote) {
  const std::string who = other.block != s.block ? "block " + std::to_string(other.block - 1)
                                                 : describe_thread(other.thread);
  fail("race: " + std::string(write ? "writes " : "reads ") + bytes_of(m, p, bytes) + " at " +
       describe(pc) + ", which " + who + (other_wrote ? " wrote" : " read") + " at " +
       describe(uintptr_t(__ehdr_start) + other.pc) + ", with nothing that orders the two");
}

void touch(Memory& m, uintptr_t p, size_t bytes, bool write, uintptr_t pc) {
  if (write && !m.writable)
    fail("writes " + bytes_of(m, p, bytes) + ", which is only to be read, at " + describe(pc));
  if (m.cells.empty()) return;
  const unsigned thread = current->thread;
  Clock* const mine = clocks_of(thread);
  const Access me = {unsigned(pc - uintptr_t(__ehdr_start)), thread, s.block, mine[thread]};
  const size_t last = (p - m.begin + bytes - 1) / kGrain;
  for (size_t i = (p - m.begin) / kGrain; i <= last; i++) {
    Cell& c = m.cells[i];
    if (c.pending)
      fail(std::string(write ? "writes " : "reads ") + bytes_of(m, p, bytes) + " at " +
           describe(pc) + ", which a cp.async of " + describe_thread(c.writer.thread) + " at " +
           describe(uintptr_t(__ehdr_start) + c.writer.pc) +
           " has yet to fill: no cp_async_wait came in between");
    if (!ordered(c.writer, mine)) race(m, p, bytes, write, pc, c.writer, true);
    if (write) {
      if (c.readers && c.reader.block == s.block) {
        const Clock* row = &s.read_clocks[size_t(c.readers) * s.threads];
        for (unsigned t = 0; t < s.threads; t++)
          if (row[t] > mine[t])
            race(m, p, bytes, true, pc, {c.reader.pc, t, s.block, row[t]}, false);
        s.free_rows.push_back(c.readers);
      } else if (!ordered(c.reader, mine)) {
        race(m, p, bytes, true, pc, c.reader, false);
      }
      c.writer = me, c.reader.clock = 0, c.readers = 0;
      continue;
    }
    if (m.shared && s.uninitialised && !c.writer.clock)
      fail("reads " + bytes_of(m, p, bytes) + " at " + describe(pc) + ", which nobody has written");
    if (c.reader.block != s.block || !c.reader.clock) {
      c.readers = 0;
    } else if (c.readers) {
      s.read_clocks[size_t(c.readers) * s.threads + thread] = me.clock;
    } else if (!ordered(c.reader, mine)) {  // a second reader at the same time
      if (s.free_rows.empty()) {
        s.free_rows.push_back(s.read_clocks.size() / s.threads);
        s.read_clocks.resize(s.read_clocks.size() + s.threads);
      }
      c.readers = s.free_rows.back();
      s.free_rows.pop_back();
      Clock* row = &s.read_clocks[size_t(c.readers) * s.threads];
      std::fill(row, row + s.threads, 0);
      row[c.reader.thread] = c.reader.clock;
      row[thread] = me.clock;
    }
    c.reader = me;
  }
}

[[noreturn]] void outside(uintptr_t p, size_t bytes, bool write, uintptr_t pc) {
  const Memory* near = nullptr;
  for (const Memory& m : s.memories)
    if (m.end > m.begin && &m != &s.memories[1] && (!near || m.distance(p) < near->distance(p)))
      near = &m;
  std::string text = std::string(write ? "writes " : "reads ") + std::to_string(bytes) +
                     " bytes at " + describe(pc) + " outside of all arrays";
  if (near && near->distance(p) < 1 << 20)
    text += p < near->begin
                ? ", " + std::to_string(near->begin - p) + " bytes before " + near->name
                : ", " + std::to_string(p - near->begin) + " bytes into the " +
                      std::to_string(near->end - near->begin) + " bytes of " + near->name;
  fail(text);
}

void access(uintptr_t p, size_t bytes, bool write, uintptr_t pc) {
  if (!on || !current) return;
  if (p >= s.stacks && p < s.stacks_end) {
    const unsigned owner = (p - s.stacks) / kStackBytes;
    if (owner == current->thread) return;
    fail("touches a local variable of " + describe_thread(owner) + " at " + describe(pc));
  }
  Memory* found = s.memories[s.last].holds(p, bytes) ? &s.memories[s.last] : nullptr;
  for (size_t i = 0; i < s.memories.size() && (!found || (write && !found->writable)); i++)
    if (s.memories[i].holds(p, bytes)) found = &s.memories[i];
  if (found) {
    s.last = found - s.memories.data();
    return touch(*found, p, bytes, write, pc);
  }
  if (p >= uintptr_t(__ehdr_start) && p < uintptr_t(_end)) return;  // constants, threadIdx
  const Memory& dynamic = s.memories[0];
  if (s.global || dynamic.distance(p) < 4096) outside(p, bytes, write, pc);
}
}  // namespace

void begin_launch(const Launch& l, unsigned threads, char* stacks, char* shared) {
  on = l.check;
  if (!on) return;
  s = State();
  s.threads = threads;
  s.uninitialised = l.check & kUninitialised;
  s.global = l.region_count;
  s.stacks = uintptr_t(stacks), s.stacks_end = s.stacks + threads * kStackBytes;
  s.memories.push_back({"dynamic shared memory",
                        uintptr_t(shared),
                        uintptr_t(shared) + l.shared_bytes,
                        true,
                        true,
                        {}});
  s.memories.push_back(
      {"static shared memory", uintptr_t(__bss_start), uintptr_t(_end), true, true, {}});
  for (size_t i = 0; i < l.region_count; i++) {
    const Region& r = l.regions[i];
    s.memories.push_back({r.name, r.begin, r.end, r.writable != 0, false, {}});
    if (r.writable) s.memories.back().cells.resize((r.end - r.begin + kGrain - 1) / kGrain);
  }
  for (auto& b : s.barriers) b.assign(threads, 0);
}

void begin_block(unsigned block) {
  s.block = block + 1;
  s.clocks.assign(size_t(s.threads) * s.threads, 0);
  for (unsigned t = 0; t < s.threads; t++) clocks_of(t)[t] = 1;
  for (int i = 0; i < 2; i++) {
    Memory& m = s.memories[i];
    m.cells.assign((m.end - m.begin + kGrain - 1) / kGrain, Cell());
  }
  s.read_clocks.assign(s.threads, 0);  // row 0 stands for none
  s.free_rows.clear();
  s.known_blocks.clear();
  for (auto& b : s.barriers) std::fill(b.begin(), b.end(), 0);
}

void read(const void* p, size_t bytes, uintptr_t pc) { access(uintptr_t(p), bytes, false, pc); }
void write(const void* p, size_t bytes, uintptr_t pc) { access(uintptr_t(p), bytes, true, pc); }

static void mark(const Copy& copy, bool pending) {
  Memory& m = s.memories[0];
  const size_t first = (uintptr_t(copy.to) - m.begin) / kGrain;
  for (size_t i = first; i < first + copy.bytes / kGrain; i++) {
    m.cells[i].pending = pending;
    m.cells[i].writer.clock = clocks_of(current->thread)[current->thread];
  }
}
void copy_issued(const Copy& copy) {
  if (copy.valid) read(copy.from, copy.valid, copy.pc);
  write(copy.to, copy.bytes, copy.pc);
  mark(copy, true);
}
void copy_landed(const Copy& copy) { mark(copy, false); }

static void advance(unsigned thread) { clocks_of(thread)[thread]++; }

void sync_warp(unsigned first, unsigned lanes) {
  std::vector<Clock> all(s.threads);
  for (unsigned m = lanes; m; m &= m - 1) join(all.data(), clocks_of(first + __builtin_ctz(m)));
  for (unsigned m = lanes; m; m &= m - 1) {
    std::copy(all.begin(), all.end(), clocks_of(first + __builtin_ctz(m)));
    advance(first + __builtin_ctz(m));
  }
}
void arrive(int barrier, unsigned first, unsigned lanes, bool wait) {
  for (unsigned m = lanes; m; m &= m - 1) {
    join(s.barriers[barrier].data(), clocks_of(first + __builtin_ctz(m)));
    if (!wait) advance(first + __builtin_ctz(m));
  }
}
void leave(int barrier, unsigned first, unsigned lanes) {
  for (unsigned m = lanes; m; m &= m - 1) {
    join(clocks_of(first + __builtin_ctz(m)), s.barriers[barrier].data());
    advance(first + __builtin_ctz(m));
  }
}
void reset(int barrier) { std::fill(s.barriers[barrier].begin(), s.barriers[barrier].end(), 0); }

static Published& published_at(const void* p) {
  Published& x = s.atomics[uintptr_t(p)];
  if (x.block != s.block) x.block = s.block, x.clocks.assign(s.threads, 0);
  return x;
}
static void atomic(const void* p, size_t bytes, uintptr_t pc) {
  Published& x = published_at(p);
  Clock* mine = clocks_of(current->thread);
  s.known_blocks.insert(x.blocks.begin(), x.blocks.end());
  join(mine, x.clocks.data());
  write(p, bytes, pc);
  join(x.clocks.data(), mine);
  x.blocks.insert(s.known_blocks.begin(), s.known_blocks.end());
  x.blocks.insert(s.block);
  advance(current->thread);
}
// A Barrier: arrivals publish what their threads did before, and those let through see it.
static void barrier(const void* p, bool arrives) {
  Published& x = published_at(p);
  Clock* mine = clocks_of(current->thread);
  if (arrives)
    join(x.clocks.data(), mine);
  else
    join(mine, x.clocks.data());
  advance(current->thread);
}
}  // namespace simt::check

namespace simt {
std::string describe(uintptr_t pc) {
  char text[32];
  snprintf(text, sizeof text, "{0x%zx}", size_t(pc - uintptr_t(__ehdr_start)));
  return text;
}
void barrier_access(const void* p, bool arrives) {
  if (check::on) check::barrier(p, arrives);
}
void atomic_access(const void* p, size_t bytes) {
  if (check::on) check::atomic(p, bytes, uintptr_t(__builtin_return_address(0)));
}
}  // namespace simt

// What instrumented code calls.
#define SIMT_PC uintptr_t(__builtin_return_address(0))
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
#define SIMT_HOOKS(n)                                                                \
  void __tsan_read##n(const void* p) { simt::check::read(p, n, SIMT_PC); }           \
  void __tsan_write##n(const void* p) { simt::check::write(p, n, SIMT_PC); }         \
  void __tsan_unaligned_read##n(const void* p) { simt::check::read(p, n, SIMT_PC); } \
  void __tsan_unaligned_write##n(const void* p) { simt::check::write(p, n, SIMT_PC); }
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
void __tsan_read_range(const void* p, size_t bytes) { simt::check::read(p, bytes, SIMT_PC); }
void __tsan_write_range(const void* p, size_t bytes) { simt::check::write(p, bytes, SIMT_PC); }

static void undefined(const char* what, uintptr_t pc) {
  if (simt::current) simt::fail(std::string(what) + " at " + simt::describe(pc));
}
struct TypeMismatch {  // what g++ hands over; source position and type come before
  const char* file;
  unsigned line, column;
  const void* type;
  unsigned char log_alignment;
};
void __ubsan_handle_type_mismatch_v1(const TypeMismatch* data, uintptr_t p) {
  const size_t alignment = size_t(1) << data->log_alignment;
  const std::string text = "address is " + std::to_string(p % alignment) +
                           " bytes off the alignment of " + std::to_string(alignment);
  undefined(text.c_str(), SIMT_PC);
}
void __ubsan_handle_out_of_bounds(const void*, size_t index) {
  undefined(("array index " + std::to_string(ptrdiff_t(index)) + " out of bounds").c_str(),
            SIMT_PC);
}
#define SIMT_UNDEFINED(name, what) \
  void __ubsan_handle_##name(const void*, size_t, size_t) { undefined(what, SIMT_PC); }
SIMT_UNDEFINED(shift_out_of_bounds, "shift by more bits than there are")
SIMT_UNDEFINED(add_overflow, "sum overflows")
SIMT_UNDEFINED(sub_overflow, "difference overflows")
SIMT_UNDEFINED(mul_overflow, "product overflows")
SIMT_UNDEFINED(divrem_overflow, "division overflows or divides by zero")
void __ubsan_handle_negate_overflow(const void*, size_t) {
  undefined("negation overflows", SIMT_PC);
}
}
