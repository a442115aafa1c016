// A stack of its own, to switch to and from; and what the sanitizers must be told of that.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
extern "C" void AnnotateBenignRaceSized(const char*, int, const volatile void*, size_t, const char*);
// The emulation's own state is no thread's: it is used by one fiber after the other.
extern "C" __attribute__((used)) const char* __tsan_default_suppressions() {
  return "race_top:emulation::\nrace_top:std::\nrace_top:LoadFromHost\n";
}
#elif defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define JAX_EP_UNWATCHED __attribute__((noinline, no_sanitize("thread", "address")))

namespace emulation {

// While one lives, its fiber's accesses are none of ThreadSanitizer's business: the emulation's own.
struct Quiet {
#if defined(__SANITIZE_THREAD__)
  Quiet() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Quiet() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Quiet() {}
#endif
  Quiet(const Quiet&) = delete;
};

inline void IgnoreRaces([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  AnnotateBenignRaceSized(__FILE__, __LINE__, data, bytes, "another block's");
#endif
}

class Fiber {
 public:
  static constexpr size_t kStackBytes = 128 << 10;

  Fiber() = default;
  Fiber(const Fiber&) = delete;
  ~Fiber() {
    if (stack_ != nullptr) munmap(stack_, kStackBytes);
  }

  // The fiber begins anew.
  void Prepare(void (*entry)()) {
    if (stack_ == nullptr) {
      stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    }
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    entry_ = entry;
    makecontext(&context_, &Fiber::Begin, 0);
    has_begun_ = false;
#if defined(__SANITIZE_THREAD__)
    if (tsan_ != nullptr) __tsan_destroy_fiber(tsan_);
    tsan_ = nullptr;
#endif
  }

  static void Switch(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_THREAD__)
    if (from.tsan_ == nullptr) from.tsan_ = __tsan_get_current_fiber();
    if (to.tsan_ == nullptr) to.tsan_ = __tsan_create_fiber(0);
    __tsan_switch_to_fiber(to.tsan_, __tsan_switch_to_fiber_no_sync);
    Begun() = &to;
    swapcontext(&from.context_, &to.context_);
#elif defined(__SANITIZE_ADDRESS__)
    void* fake;
    __sanitizer_start_switch_fiber(&fake, to.stack_ == nullptr ? to.bottom_ : to.stack_,
                                   to.stack_ == nullptr ? to.size_ : kStackBytes);
    Begun() = &to;
    Last() = &from;
    swapcontext(&from.context_, &to.context_);
    __sanitizer_finish_switch_fiber(fake, &Last()->bottom_, &Last()->size_);
#else
    // Without the system calls that swapcontext makes.
    if (_setjmp(from.jump_) != 0) return;
    if (to.has_begun_ || to.stack_ == nullptr) _longjmp(to.jump_, 1);
    Begun() = &to;
    setcontext(&to.context_);
#endif
  }

 private:
  static Fiber*& Begun() {
    static Fiber* begun;
    return begun;
  }
  static Fiber*& Last() {
    static Fiber* last;
    return last;
  }
  static void Begin() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &Last()->bottom_, &Last()->size_);
#endif
    Begun()->has_begun_ = true;
    Begun()->entry_();
  }

  void* stack_ = nullptr;
  ucontext_t context_;
  jmp_buf jump_;
  void (*entry_)() = nullptr;
  bool has_begun_ = false;
  void* tsan_ = nullptr;
  const void* bottom_ = nullptr;  // of the stack that the program began with
  size_t size_ = 0;
};

}  // namespace emulation
