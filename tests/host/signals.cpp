// While kernels run, what would kill the process ends the launch instead.
#include <pthread.h>
#include <signal.h>

#include "runtime.h"

namespace simt {
namespace {
constexpr int kNumbers[] = {SIGSEGV, SIGBUS, SIGFPE};
constexpr size_t kBytes = 64 << 10;
char* const memory = new char[kBytes];  // for the handler, since the stack may be what ran out
pthread_t owner;
stack_t old_stack;
struct sigaction old[3];

void caught(int number, siginfo_t* info, void*) {
  if (!current || !pthread_equal(owner, pthread_self())) {  // as if there were no handler
    signal(number, SIG_DFL);
    return;
  }
  if (number == SIGFPE) fail("divides an integer by zero, or overflows in a division");
  const char* p = static_cast<const char*>(info->si_addr);
  if (p >= current->stack && p < current->stack + kPage)
    fail("its local variables overflow the stack");
  char text[64];
  snprintf(text, sizeof text, "there is no memory at address %p", info->si_addr);
  fail(text);
}
}  // namespace

Signals::Signals() {
  owner = pthread_self();
  stack_t stack = {};
  stack.ss_sp = memory, stack.ss_size = kBytes;
  sigaltstack(&stack, &old_stack);
  struct sigaction action = {};
  action.sa_sigaction = caught;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 3; i++) sigaction(kNumbers[i], &action, &old[i]);
}

Signals::~Signals() {
  for (int i = 0; i < 3; i++) sigaction(kNumbers[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
}
}  // namespace simt
