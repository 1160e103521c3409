// A store by commands of the shell. The words that stand for {file} and {key} are quoted, so that
// no name is taken for more than a name.

#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "tessera/checkpoint/object_store.h"
#include "tessera/comm/detail/rank_threads.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

std::string shell_word(const std::string& word) {
  std::string text = "'";
  for (const char c : word) {
    text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return text + "'";
}

/// In one pass: a key that has the text {file} in it is quoted as it is.
std::string with_words(const std::string& command, const std::string& key,
                       const std::string& file) {
  constexpr std::string_view kKey = "{key}", kFile = "{file}";
  std::string text;
  for (std::size_t at = 0; at < command.size();) {
    const std::string_view rest = std::string_view(command).substr(at);
    if (rest.starts_with(kKey)) {
      text += shell_word(key);
      at += kKey.size();
    } else if (rest.starts_with(kFile)) {
      text += shell_word(file);
      at += kFile.size();
    } else {
      text += command[at++];
    }
  }
  return text;
}

/// ": " and the last line; "" of none.
std::string last_line(const std::string& text) {
  const auto end = text.find_last_not_of('\n');
  if (end == std::string::npos) {
    return "";
  }
  const auto begin = text.rfind('\n', end);
  return ": " + text.substr(begin + 1, end - begin);
}

std::string how_it_failed(int status) {
  return WIFSIGNALED(status) ? "was ended by signal " + std::to_string(WTERMSIG(status))
                             : "failed with exit code " + std::to_string(WEXITSTATUS(status));
}

std::string all_of(int fd) {
  std::string text;
  std::array<char, 4096> part{};
  for (ssize_t size = 0; (size = ::read(fd, part.data(), part.size())) > 0;) {
    text.append(part.data(), static_cast<std::size_t>(size));
  }
  close(fd);
  return text;
}

int spawn(const std::string& command, int out, int err) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err, STDERR_FILENO);
  const std::array<const char*, 4> words{"sh", "-c", command.c_str(), nullptr};
  pid_t pid = 0;
  const int error = posix_spawn(&pid, "/bin/sh", &actions, nullptr,
                                const_cast<char* const*>(words.data()), environ);
  posix_spawn_file_actions_destroy(&actions);
  TESSERA_CHECK(error == 0, "'", command, "' cannot be run: ", std::strerror(error));
  return pid;
}

/// The other ranks wait as long as the command runs: an object may take longer than their time-out,
/// and how long a silent store is waited for, the command knows.
int status_of(pid_t pid) {
  constexpr std::chrono::milliseconds kLongest{100};
  std::chrono::milliseconds pause{1};
  int status = 0;
  for (pid_t ended = 0; ended != pid; pause = std::min(2 * pause, kLongest)) {
    ended = waitpid(pid, &status, WNOHANG);
    if (ended < 0 && errno != EINTR) {
      break;
    }
    if (ended != pid) {
      comm::note_progress(flight::Work::kWriting);
      std::this_thread::sleep_for(pause);
    }
  }
  return status;
}

/// What the command has written to its standard output.
std::string output_of(const std::string& command) {
  // In memory, so that no command waits for its reader.
  const int out = memfd_create("out", MFD_CLOEXEC), err = memfd_create("err", MFD_CLOEXEC);
  TESSERA_CHECK(out >= 0 && err >= 0, "no memory for the output of '", command,
                "': ", std::strerror(errno));
  const int status = status_of(spawn(command, out, err));
  lseek(out, 0, SEEK_SET);
  lseek(err, 0, SEEK_SET);
  std::string output = all_of(out);
  const std::string errors = all_of(err);
  TESSERA_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "'", command, "' ",
                how_it_failed(status), last_line(errors.empty() ? output : errors));
  return output;
}

class CommandStore final : public ObjectStore {
 public:
  explicit CommandStore(StoreCommands commands) : commands_(std::move(commands)) {}

  void put(const std::filesystem::path& file, const std::string& key) override {
    output_of(with_words(commands_.put, key, file));
  }

  void get(const std::string& key, const std::filesystem::path& file) override {
    output_of(with_words(commands_.get, key, file));
  }

  std::vector<Object> list(const std::string& prefix) override {
    std::istringstream lines(output_of(with_words(commands_.list, prefix, "")));
    std::vector<Object> objects;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream in(line);
      Object object;
      TESSERA_CHECK(
          in >> object.bytes >> std::ws && std::getline(in, object.key), "'", commands_.list,
          "' printed '", line,
          "', which is no line BYTES KEY; make it print one for each object, and no more");
      objects.push_back(std::move(object));
    }
    return objects;
  }

 private:
  StoreCommands commands_;
};

}  // namespace

std::unique_ptr<ObjectStore> command_store(StoreCommands commands) {
  return std::make_unique<CommandStore>(std::move(commands));
}

}  // namespace tessera::checkpoint
