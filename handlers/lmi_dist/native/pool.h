// Threads that help a caller with work that they divide among themselves: in_parallel.
//
// A helper is made when it is first needed, and stays. While it has nothing to do it spins for a moment, then sleeps; one
// that has not begun when the caller is done is withdrawn, so that a busy core holds nobody up. A helper belongs to
// at most one caller, so callers at the same time have helpers of their own. A forked child begins without any.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

namespace lmi {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A number that threads wait for. They spin for a while, then sleep.
class Signal {
  public:
    explicit constexpr Signal(int number) : number(number) {}

    int get() const { return number.load(); }

    void set(int to) {
        number.store(to);
        if (sleepers.load()) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
    }

    // Sets it if it is `from`, and wakes nobody.
    bool change(int from, int to) { return number.compare_exchange_strong(from, to); }

    // Waits while it is `old`, and returns what it is then.
    int wait(int old) {
        for (int i = 0; i < 2000; i++, pause())
            if (const int now = number.load(); now != old) return now;
        sleepers.fetch_add(1);
        int now;
        while ((now = number.load()) == old) futex(FUTEX_WAIT_PRIVATE, old);
        sleepers.fetch_sub(1);
        return now;
    }

  private:
    void futex(int operation, int value) { syscall(SYS_futex, &number, operation, value, nullptr, nullptr, 0); }

    std::atomic<int> number;
    std::atomic<int> sleepers{0};
};

class alignas(64) Helper {
  public:
    // False if the helper belongs to another caller, or is none because the system gives no thread.
    bool join(void (*new_work)(const void*), const void* new_context) {
        const bool is_new = state.change(NONE, HELD);
        if (!is_new && !state.change(FREE, HELD)) return false;
        work = new_work;
        context = new_context;
        if (is_new && !start()) {
            state.set(NONE);
            return false;
        }

        state.set(OFFERED);
        return true;
    }

    // Returns when the helper is out of the work, or will not begin it.
    void leave() {
        if (state.change(OFFERED, FREE)) return;
        while (!state.change(HELD, FREE)) state.wait(BUSY);
    }

    bool is_none() { return state.change(NONE, NONE); }

    // In a forked child, which has none of its parent's threads.
    void forget() {
        if (!is_none()) new (this) Helper;
    }

    // The next helper of the same caller.
    Helper* next = nullptr;

  private:
    enum : int {
        // It has no thread yet.
        NONE,
        // Nobody has it.
        FREE,
        // A caller has it, with nothing to do.
        HELD,
        // It has work that it may begin and the caller may withdraw.
        OFFERED,
        BUSY
    };

    // The process's handlers of signals run on its own threads, apart from those of the helper's own faults.
    bool start() {
        sigset_t signals, before;
        sigfillset(&signals);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&signals, fault);
        // The new thread begins with the mask of this one.
        sigprocmask(SIG_SETMASK, &signals, &before);
        bool is_started = true;
        try {
            std::thread(&Helper::serve, this).detach();
        } catch (const std::system_error&) {
            is_started = false;
        }

        sigprocmask(SIG_SETMASK, &before, nullptr);
        return is_started;
    }

    void serve() {
        prctl(PR_SET_NAME, "lmi-kernels");
        for (;;) {
            const int number = state.get();
            if (number != OFFERED) {
                state.wait(number);
            } else if (state.change(OFFERED, BUSY)) {
                work(context);
                state.set(HELD);
            }
        }
    }

    Signal state{NONE};
    void (*work)(const void*) = nullptr;
    const void* context = nullptr;
};

// They are never destroyed: at the end of the process they may still wait.
inline Helper helpers[1023];

inline const int is_forgotten_at_fork = pthread_atfork(nullptr, nullptr, [] {
    for (Helper& helper : helpers) helper.forget();
});

// Calls `work()` on this thread and on up to num_threads - 1 others, and returns when no thread is in it any more. It may
// run on this thread alone, so each call must take what is left to do until nothing is. It must not throw.
template <class Work>
void in_parallel(int num_threads, const Work& work) {
    const auto call = [](const void* context) { (*static_cast<const Work*>(context))(); };
    Helper* team = nullptr;
    for (Helper& helper : helpers) {
        if (num_threads <= 1) break;
        if (helper.join(call, &work)) {
            helper.next = team;
            team = &helper;
            num_threads--;
        }

        if (helper.is_none()) break;
    }

    work();
    for (Helper* next; team; team = next) {
        // Read it before another caller has the helper.
        next = team->next;
        team->leave();
    }
}

}  // namespace lmi
