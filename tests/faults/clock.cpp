// Simulates a host with a wrong clock. Preloaded, TESSERA_FAULT_CLOCK=SECONDS shifts the time of
// day that the process reads, with TESSERA_FAULT_RANK=R only that of rank R. With
// TESSERA_FAULT_CLOCK_FILE=PATH the clock is right until the file exists. Monotonic clocks are
// unchanged.

#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace {

time_t read_shift() {
  const char* seconds = std::getenv("TESSERA_FAULT_CLOCK");
  const char* of = std::getenv("TESSERA_FAULT_RANK");
  const char* rank = std::getenv("RANK");
  const bool here = of == nullptr || (rank != nullptr && std::strcmp(of, rank) == 0);
  return seconds != nullptr && here ? std::atol(seconds) : 0;
}

using ClockGettime = int (*)(clockid_t, timespec*);

int read_clock(clockid_t clock, timespec* time) {
  static const auto real = reinterpret_cast<ClockGettime>(dlsym(RTLD_NEXT, "clock_gettime"));
  return real(clock, time);
}

time_t shift() {
  static const time_t seconds = read_shift();
  static const char* const file = std::getenv("TESSERA_FAULT_CLOCK_FILE");
  return file == nullptr || access(file, F_OK) == 0 ? seconds : 0;
}

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) {
  const int status = read_clock(clock, time);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    time->tv_sec += shift();
  }
  return status;
}

extern "C" int gettimeofday(timeval* time, void*) {
  timespec now{};
  const int status = clock_gettime(CLOCK_REALTIME, &now);
  *time = {now.tv_sec, now.tv_nsec / 1000};
  return status;
}

extern "C" time_t time(time_t* result) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  if (result != nullptr) {
    *result = now.tv_sec;
  }
  return now.tv_sec;
}
