// Counts the instructions of a call: a child steps the calling thread through it, one by one. What
// it counts is the same on a busy machine.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

// Marks the beginning and the end. A traced thread stops for a signal that it ignores, too.
#define MARK SIGURG

static int stopped(pid_t thread) {  // the signal, or -1 where the thread is gone
  int status;
  if (waitpid(thread, &status, __WALL) != thread || !WIFSTOPPED(status)) return -1;
  return WSTOPSIG(status);
}

static void trace(pid_t thread, int ready, int result) {
  long steps = -1;
  char byte = 0;
  if (ptrace(PTRACE_SEIZE, thread, 0, 0) == 0) byte = 1;
  if (write(ready, &byte, 1) != 1 || !byte) return;
  int signal = stopped(thread);
  while (signal > 0 && signal != MARK) {
    ptrace(PTRACE_CONT, thread, 0, signal);
    signal = stopped(thread);
  }
  if (signal == MARK) {
    steps = 0;
    signal = 0;
    for (;;) {
      if (ptrace(PTRACE_SINGLESTEP, thread, 0, signal)) break;
      signal = stopped(thread);
      if (signal < 0 || signal == MARK) break;
      if (signal == SIGTRAP) ++steps, signal = 0;
    }
  }
  ptrace(PTRACE_DETACH, thread, 0, 0);
  if (write(result, &steps, sizeof steps) != sizeof steps) return;
}

// Instructions of run(), and of what is called around it; -1 where this process may not be traced.
extern "C" long count_instructions(void (*run)(void)) {
  int go[2], ready[2], result[2];
  if (pipe(go) || pipe(ready) || pipe(result)) return -1;
  const pid_t thread = (pid_t)syscall(SYS_gettid);
  const pid_t child = fork();
  char byte = 0;
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (read(go[0], &byte, 1) == 1) trace(thread, ready[1], result[1]);
    _exit(0);
  }
  prctl(PR_SET_PTRACER, child, 0, 0, 0);
  long steps = -1;
  if (child > 0 && write(go[1], &byte, 1) == 1 && read(ready[0], &byte, 1) == 1 && byte) {
    void (*before)(int) = signal(MARK, SIG_IGN);
    syscall(SYS_tgkill, getpid(), thread, MARK);
    run();
    syscall(SYS_tgkill, getpid(), thread, MARK);
    signal(MARK, before);
    if (read(result[0], &steps, sizeof steps) != sizeof steps) steps = -1;
  }
  int status;
  if (child > 0) waitpid(child, &status, 0);
  for (int i = 0; i < 2; ++i) close(go[i]), close(ready[i]), close(result[i]);
  return steps;
}
