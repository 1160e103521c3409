#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

namespace tessera::testing {

/// Sets an environment variable, until the object is destroyed. The constructor and the destructor
/// must not run while another thread reads the environment.
class ScopedVariable {
 public:
  ScopedVariable(std::string name, const std::string& value) : name_(std::move(name)) {
    if (const char* outer = std::getenv(name_.c_str())) {
      outer_ = outer;
    }
    setenv(name_.c_str(), value.c_str(), /*overwrite=*/1);
  }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;
  ~ScopedVariable() {
    if (outer_) {
      setenv(name_.c_str(), outer_->c_str(), /*overwrite=*/1);
    } else {
      unsetenv(name_.c_str());
    }
  }

 private:
  std::string name_;
  std::optional<std::string> outer_;
};

/// Sets TESSERA_DEBUG for ranks whose threads start while the object exists.
class DebugChecks : public ScopedVariable {
 public:
  explicit DebugChecks(const char* value) : ScopedVariable("TESSERA_DEBUG", value) {}
};

/// Sets TESSERA_SHM: whether Gloo groups on one host use shared memory. Applies to new groups.
class SharedMemory : public ScopedVariable {
 public:
  explicit SharedMemory(bool used) : ScopedVariable("TESSERA_SHM", used ? "1" : "0") {}
};

}  // namespace tessera::testing
