// Runs a grid on one CPU thread: a fibre per CUDA thread, block after block. A fibre runs until it
// waits for others; which one runs next is the order asked for.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "runtime.h"

uint3 threadIdx = {1, 1, 1}, blockIdx = {1, 1, 1};  // values keep them out of .bss (check.cpp)
dim3 blockDim, gridDim;

namespace simt {
unsigned lane = 1;
Fibre* current = nullptr;

namespace {
// A lane is in exactly one of these sets: ready, posted (waits for its warp), blocked (waits at a
// barrier), done.
struct Warp {
  unsigned exist, ready, posted, blocked, done;
};
struct Barrier {
  int threads = 0, arrived = 0;  // threads = 0: the whole block
  bool used = false;
  unsigned warps = 0, waiting = 0;  // that have arrived, and those of them that wait
  Site site{};
};
struct State {
  std::vector<Fibre> fibres;
  std::vector<Warp> warps;
  Barrier barriers[16];
  char* stacks = nullptr;
  std::vector<char> shared;
  char* shared_begin = nullptr;
  size_t shared_bytes = 0;
  jmp_buf scheduler;
  void (*body)(void*) = nullptr;
  void* context = nullptr;
  unsigned order = 0, random = 0;
  bool failed = false, paused = false, together = false;
  std::string message;
};
State& s = *new State;
constexpr unsigned kNap = 100;    // microseconds
constexpr time_t kPatience = 20;  // seconds
constexpr size_t kGuard = 4096;   // NaN before and behind the dynamic shared memory

unsigned random_below(unsigned n) {
  s.random = s.random * 1664525u + 1013904223u;
  return (s.random >> 8) % n;
}

void back_to_scheduler() {
  if (!_setjmp(current->context)) _longjmp(s.scheduler, 1);
}

void start() {
  s.body(s.context);
  Warp& w = s.warps[current->warp];
  w.ready &= ~(1u << current->lane);
  w.done |= 1u << current->lane;
  _longjmp(s.scheduler, 1);
}

void resume(Fibre& f) {
  current = &f;
  threadIdx = f.tid;
  simt::lane = f.lane;
  if (!_setjmp(s.scheduler)) {
    if (f.started) _longjmp(f.context, 1);
    f.started = true;
    static ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = f.stack + kPage;
    context.uc_stack.ss_size = kStackBytes - kPage;
    context.uc_link = nullptr;
    makecontext(&context, start, 0);
    setcontext(&context);
  }
  current = nullptr;
  if (s.failed) throw std::runtime_error(s.message);
}

// Waits until every lane of the mask has come to the same warp-wide instruction.
void post(const Post& p) {
  Fibre& f = *current;
  Warp& w = s.warps[f.warp];
  if (!(p.mask >> f.lane & 1))
    fail("a lane calls " + describe(p.site) + " without being in its mask");
  f.post = p;
  w.ready &= ~(1u << f.lane);
  w.posted |= 1u << f.lane;
  back_to_scheduler();
}

bool same(const Post& a, const Post& b) {
  if (strcmp(a.site.what, b.site.what) || a.mask != b.mask) return false;
  // __syncwarp may be called from different places, every other instruction is executed together
  return !strcmp(a.site.what, "__syncwarp") ||
         (a.site.line == b.site.line && !strcmp(a.site.file, b.site.file));
}

void release(int id) {
  Barrier& b = s.barriers[id];
  for (size_t i = 0; i < s.warps.size() && check::on && !b.threads; i++)
    if (!(b.waiting >> i & 1)) check::arrive(id, i * 32, s.warps[i].done, true);
  for (size_t i = 0; i < s.warps.size(); i++)
    if (b.waiting >> i & 1) {
      Warp& w = s.warps[i];
      if (check::on) check::leave(id, i * 32, w.blocked);
      w.ready |= w.blocked;
      w.blocked = 0;
    }
  if (check::on) check::reset(id);
  b = Barrier();
}

// Barrier of the whole block: warps whose threads have all exited count as arrived.
void release_if_complete(int id) {
  Barrier& b = s.barriers[id];
  if (!b.used) return;
  if (b.threads) {
    if (b.arrived == b.threads) release(id);
    return;
  }
  for (size_t i = 0; i < s.warps.size(); i++)
    if (!(b.warps >> i & 1) && s.warps[i].done != s.warps[i].exist) return;
  release(id);
}

void arrive(unsigned index, unsigned lanes, const Post& p) {
  Barrier& b = s.barriers[p.barrier];
  Warp& w = s.warps[index];
  if (b.used && b.threads != p.threads)
    fail(describe(p.site) + " and " + describe(b.site) + " meet at barrier " +
         std::to_string(p.barrier) + " with different numbers of threads");
  if (b.warps >> index & 1)
    fail("warp " + std::to_string(index) + " comes to barrier " + std::to_string(p.barrier) +
         " at " + describe(p.site) + " a second time before the others have come");
  b.used = true, b.threads = p.threads, b.site = p.site;
  b.arrived += 32;  // the hardware counts whole warps
  if (b.threads && b.arrived > b.threads)
    fail("more than " + std::to_string(b.threads) + " threads come to barrier " +
         std::to_string(p.barrier) + " at " + describe(p.site));
  if (check::on) check::arrive(p.barrier, index * 32, lanes | w.done, p.wait);
  b.warps |= 1u << index;
  if (p.wait) {
    b.waiting |= 1u << index;
    w.blocked |= lanes;
  } else {
    w.ready |= lanes;
  }
  release_if_complete(p.barrier);
}

// Carries out the instructions whose lanes have all come.
void complete(unsigned index) {
  Warp& w = s.warps[index];
  Fibre* lanes = &s.fibres[index * 32];
  for (unsigned left = w.posted; left;) {
    const unsigned lane = __builtin_ctz(left);
    const Post& p = lanes[lane].post;
    const unsigned members = p.mask & w.exist & ~w.done;
    left &= ~(1u << lane);
    if (members & ~w.posted) continue;
    for (unsigned i = 0; i < 32; i++)
      if (members >> i & 1 && !same(p, lanes[i].post))
        fail("warp " + std::to_string(index) + " diverges: " + describe_thread(index * 32 + lane) +
             " is at " + describe(p.site) + ", " + describe_thread(index * 32 + i) + " at " +
             describe(lanes[i].post.site));
    left &= ~members;
    w.posted &= ~members;
    if (p.barrier >= 0) {
      arrive(index, members, p);
      continue;
    }
    if (!p.value && check::on) check::sync_warp(index * 32, members);
    for (unsigned i = 0; i < 32; i++) {
      const Post& to = lanes[i].post;
      if (!(members >> i & 1) || !p.value) continue;
      for (unsigned j = 0; j < 32; j++) {
        const bool all = to.source == ~0u;
        if (!all && j != to.source) continue;
        char* slot = static_cast<char*>(to.result) + (all ? j * to.bytes : 0);
        if (members >> j & 1)
          memcpy(slot, lanes[j].post.value, to.bytes);
        else
          memset(slot, 0xff, to.bytes);
      }
    }
    w.ready |= members;
  }
}

// Runs every ready lane of a warp up to its next wait.
void step(unsigned index) {
  Warp& w = s.warps[index];
  const bool shuffled = s.order > 1;
  const unsigned times = shuffled ? random_below(16) * 2 + 1 : s.order ? 31 : 1;
  const unsigned plus = shuffled ? random_below(32) : s.order ? 31 : 0;
  const unsigned ready = w.ready;
  for (unsigned i = 0; i < 32; i++) {
    const unsigned lane = (i * times + plus) % 32;
    if (ready >> lane & 1) resume(s.fibres[index * 32 + lane]);
  }
  complete(index);
  if (w.done == w.exist) release_if_complete(0);
}

[[noreturn]] void deadlock() {
  std::string text = "deadlock:";
  int shown = 0;
  for (size_t i = 0; i < s.warps.size() && shown < 8; i++) {
    const Warp& w = s.warps[i];
    for (unsigned left = w.posted | w.blocked; left && shown < 8; shown++) {
      const Fibre& f = s.fibres[i * 32 + __builtin_ctz(left)];
      unsigned together = 0, last = f.lane;
      for (unsigned j = f.lane; j < 32; j++)
        if (left >> j & 1 && same(f.post, s.fibres[i * 32 + j].post)) together |= 1u << j, last = j;
      left &= ~together;
      char mask[32];
      snprintf(mask, sizeof mask, " (mask 0x%08x)", f.post.mask);
      text += (shown ? "; warp " : " warp ") + std::to_string(i) + " lanes " +
              std::to_string(f.lane) + ".." + std::to_string(last) + " wait at " +
              describe(f.post.site) + (f.post.barrier < 0 ? mask : "");
      if (f.post.barrier > 0) text += " for barrier " + std::to_string(f.post.barrier);
    }
  }
  fail(text);
}

std::vector<unsigned> block_order(unsigned count) {
  std::vector<unsigned> order(count);
  for (unsigned i = 0; i < count; i++) order[i] = s.order == 1 ? count - 1 - i : i;
  for (unsigned i = count; s.order > 1 && i > 1; i--)
    std::swap(order[i - 1], order[random_below(i)]);
  return order;
}

// Whatever lies around the dynamic shared memory must still be what it was filled with.
void check_guard() {
  const char* const end = s.shared_begin + s.shared_bytes;
  const auto touched = [](char x) { return x != char(0xff); };
  const char *const first = s.shared.data(), *const last = first + s.shared.size();
  const char* p = std::find_if(first, static_cast<const char*>(s.shared_begin), touched);
  if (p == s.shared_begin) p = std::find_if(end, last, touched);
  if (p != last)
    fail("some thread writes at offset " + std::to_string(p - s.shared_begin) + " of the " +
         std::to_string(s.shared_bytes) + " bytes of dynamic shared memory");
}

void run_block() {
  const unsigned threads = s.fibres.size(), count = s.warps.size();
  for (Fibre& f : s.fibres) f.started = false, f.copies.clear(), f.group = 0;
  for (unsigned i = 0; i < count; i++) {
    const unsigned lanes = std::min(32u, threads - i * 32);
    const unsigned exist = lanes == 32 ? ~0u : (1u << lanes) - 1;
    s.warps[i] = {exist, exist, 0, 0, 0};
  }
  for (Barrier& b : s.barriers) b = Barrier();
  s.paused = false;
  unsigned idle = 0, naps = 0;  // steps in a row in which some thread only paused
  time_t begin = 0;
  for (unsigned index = 0, tried;;) {
    if (s.order > 1)
      index = random_below(count);
    else if (!s.paused)
      index = s.order ? count - 1 : 0;
    for (tried = 0; tried < count && !s.warps[index].ready; tried++)
      index = (index + (s.order == 1 ? count - 1 : 1)) % count;
    if (tried == count) {
      for (const Warp& w : s.warps)
        if (w.done != w.exist) deadlock();
      return;
    }
    s.paused = false;
    step(index);
    idle = s.paused ? idle + 1 : 0;
    if (idle == 10000 && s.together) {  // another block may be what they wait for
      if (naps++ == 0) begin = time(nullptr);
      if (time(nullptr) - begin < kPatience) {
        usleep(kNap);
        idle = 9900;
      }
    } else if (idle == 0) {
      naps = 0;
    }
    if (idle >= 10000) fail("livelock: threads only sleep (__nanosleep)");
    if (s.paused) index = (index + (s.order == 1 ? count - 1 : 1)) % count;
  }
}
}  // namespace

void fail(const std::string& message) {
  const std::string where = "block (" + std::to_string(blockIdx.x) + ", " +
                            std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) + ")";
  s.message = where + (current ? ", " + describe_thread(current->thread) : "") + ": " + message;
  s.failed = true;
  if (current) _longjmp(s.scheduler, 1);
  throw std::runtime_error(s.message);
}

std::string describe(const Site& site) {
  const char* name = strrchr(site.file, '/');
  return std::string(site.what) + " (" + (name ? name + 1 : site.file) + ":" +
         std::to_string(site.line) + ")";
}

std::string describe_thread(unsigned thread) {
  const Fibre& f = s.fibres[thread];
  std::string text = "thread " + std::to_string(f.tid.x);
  if (blockDim.y > 1 || blockDim.z > 1)
    text = "thread (" + std::to_string(f.tid.x) + ", " + std::to_string(f.tid.y) + ", " +
           std::to_string(f.tid.z) + ")";
  return text + " (warp " + std::to_string(f.warp) + " lane " + std::to_string(f.lane) + ")";
}

void* dynamic_shared() { return s.shared_begin; }

void barrier(int id, int threads, bool wait, Site site) {
  if (id < 0 || id > 15)
    fail(describe(site) + ": barriers are numbered 0 to 15, got " + std::to_string(id));
  if (threads % 32 || threads < 0 || size_t(threads) > s.warps.size() * 32)
    fail(describe(site) + ": " + std::to_string(threads) +
         " threads are no multiple of 32 within the block");
  post({site, ~0u, nullptr, nullptr, 0, 0, id, threads, wait});
}
void sync_warp(unsigned mask, Site site) {
  post({site, mask, nullptr, nullptr, 0, 0, -1, 0, true});
}
void gather(unsigned mask, const void* value, void* all, size_t bytes, Site site) {
  post({site, mask, value, all, bytes, ~0u, -1, 0, true});
}
void shuffle(unsigned mask, const void* value, void* result, size_t bytes, unsigned source,
             Site site) {
  post({site, mask, value, result, bytes, source & 31, -1, 0, true});
}
void pause() {
  s.paused = true;
  back_to_scheduler();
}
void trap(Site site) { fail(describe(site)); }

static void land(const Copy& c) {
  memcpy(c.to, c.from, c.valid);
  memset(c.to + c.valid, 0, c.bytes - c.valid);
}
void copy_async(void* to, const void* from, unsigned bytes, unsigned valid, Site site) {
  Fibre& f = *current;
  const Copy c = {static_cast<char*>(to),
                  static_cast<const char*>(from),
                  bytes,
                  valid,
                  f.group,
                  uintptr_t(__builtin_return_address(0))};
  if ((uintptr_t(to) | uintptr_t(from)) % bytes)
    fail(describe(site) + ": not aligned to its " + std::to_string(bytes) + " bytes");
  if (valid > bytes) fail(describe(site) + ": more valid bytes than it copies");
  if (c.to < s.shared_begin || c.to + bytes > s.shared_begin + s.shared_bytes)
    fail(describe(site) + ": the destination is " + std::to_string(c.to - s.shared_begin) +
         " bytes into " + std::to_string(s.shared_bytes) + " bytes of dynamic shared memory");
  if (check::on)
    check::copy_issued(c);
  else if (s.order > 1 && random_below(2))
    return land(c);  // as early as it can, else as late
  f.copies.push_back(c);
}
void copy_commit() { current->group++; }
void copy_wait(int groups) {
  std::vector<Copy> later;
  for (const Copy& c : current->copies)
    if (c.group >= current->group - groups) {
      later.push_back(c);
    } else {
      land(c);
      if (check::on) check::copy_landed(c);
    }
  current->copies.swap(later);
}

// Memory for one launch: a process may have only so many mappings, and every guarded stack is two.
struct Stacks {
  const size_t bytes;

  explicit Stacks(unsigned threads) : bytes(threads * kStackBytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    s.stacks = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
    for (size_t at = 0; s.stacks && at < bytes; at += kStackBytes)
      mprotect(s.stacks + at, kPage, PROT_NONE);
  }
  ~Stacks() {
    if (s.stacks) munmap(s.stacks, bytes);
  }
};

void run_block(dim3 grid, unsigned index) {
  blockIdx = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
  std::fill(s.shared.begin(), s.shared.end(), char(0xff));  // NaN of every type
  if (check::on) check::begin_block(index);
  run_block();
  check_guard();
}

// Begins a process that runs one block and leaves a message where it fails.
pid_t begin_block(dim3 grid, unsigned index, char* message, size_t bytes) {
  const pid_t child = fork();
  if (child != 0) return child;
  try {
    run_block(grid, index);
  } catch (const std::exception& e) {
    strncpy(message, e.what(), bytes - 1);
    _exit(1);
  }
  _exit(0);
}

// Runs each block in a process of its own, until one fails.
void run_together(dim3 grid) {
  constexpr size_t kBytes = 4096;
  void* const page =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw std::runtime_error("no memory");
  char* const message = static_cast<char*>(page);
  std::vector<pid_t> children;
  for (unsigned index : block_order(grid.x * grid.y * grid.z))
    children.push_back(begin_block(grid, index, message, kBytes));
  bool failed = false;
  while (!children.empty()) {
    for (size_t i = 0; i < children.size();) {
      int status = 0;
      if (children[i] > 0 && waitpid(children[i], &status, WNOHANG) == 0) {
        i++;
        continue;
      }
      failed |= children[i] < 0 || status != 0;
      children.erase(children.begin() + i);
    }
    if (failed)
      for (pid_t child : children)
        if (child > 0) kill(child, SIGKILL);
    usleep(kNap);
  }
  const std::string text = message;
  munmap(page, kBytes);
  if (failed) throw std::runtime_error(text.empty() ? "a block's process came to an end" : text);
}

int launch(const Launch& l, void (*body)(void*), void* context) {
  const dim3 grid(l.grid[0], l.grid[1], l.grid[2]), block(l.block[0], l.block[1], l.block[2]);
  const unsigned threads = block.x * block.y * block.z;
  s.body = body, s.context = context, s.order = s.random = l.order;
  s.failed = false, s.together = l.together, current = nullptr;
  gridDim = grid, blockDim = block;
  const Stacks stacks(threads);
  if (!s.stacks) return s.message = "no memory", 1;
  s.fibres.resize(threads);
  s.warps.resize((threads + 31) / 32);
  for (unsigned i = 0; i < threads; i++) {
    Fibre& f = s.fibres[i];
    f.stack = s.stacks + i * kStackBytes;
    f.tid = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
    f.thread = i, f.lane = i % 32, f.warp = i / 32;
  }
  s.shared.resize(l.shared_bytes + 2 * kGuard + 1024);
  s.shared_bytes = l.shared_bytes;
  s.shared_begin =
      reinterpret_cast<char*>((uintptr_t(s.shared.data()) + kGuard + 1023) & ~uintptr_t(1023));
  try {
    const Signals signals;
    check::begin_launch(l, threads, s.stacks, s.shared_begin);
    if (l.together)
      run_together(grid);
    else
      for (unsigned index : block_order(grid.x * grid.y * grid.z)) run_block(grid, index);
  } catch (const std::exception& e) {
    s.message = e.what();
    current = nullptr;
    return 1;
  }
  return 0;
}
}  // namespace simt

extern "C" __attribute__((visibility("default"))) const char* simt_message() {
  return simt::s.message.c_str();
}
