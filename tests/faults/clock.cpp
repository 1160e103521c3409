// The clock of a rank whose host has another time: preloaded, TESSERA_FAULT_CLOCK=SECONDS shifts
// the time of day that the process reads, and with TESSERA_FAULT_RANK=R that of rank R alone.
// Clocks that only measure stay as they are.

#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

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

time_t shift() {
  static const time_t read = read_shift();
  return read;
}

using ClockGettime = int (*)(clockid_t, timespec*);

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) {
  static const auto real = reinterpret_cast<ClockGettime>(dlsym(RTLD_NEXT, "clock_gettime"));
  const int status = real(clock, time);
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
