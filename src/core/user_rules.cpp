#include "user_rules.h"

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/register_rule.h"

namespace tessera {
namespace {

struct UserRules {
  std::mutex mutex;
  std::map<std::string, RuleFunction::Entry, std::less<>> rules;  // entries keep their addresses
  std::set<std::string, std::less<>> looked_up;
};

UserRules& user_rules() {
  // Never destroyed: operators may still run while statics are.
  static auto* instance = new UserRules;
  return *instance;
}

}  // namespace

const RuleFunction::Entry* detail::look_up_user_rule(std::string_view op) {
  auto& all = user_rules();
  const std::lock_guard lock(all.mutex);
  all.looked_up.emplace(op);
  const auto found = all.rules.find(op);
  return found == all.rules.end() ? nullptr : &found->second;
}

void register_rule(std::string op, RuleFunction::Body body, bool reads_numbers) {
  TESSERA_CHECK(body != nullptr, "register_rule of ", op, " without a rule; give a function");
  auto& all = user_rules();
  const std::lock_guard lock(all.mutex);
  TESSERA_CHECK(all.looked_up.count(op) == 0, "register_rule of ", op,
                " came after its first use; register rules when the program starts");
  const bool added =
      all.rules.try_emplace(op, RuleFunction::Entry{std::move(body), reads_numbers}).second;
  TESSERA_CHECK(added, "register_rule of ", op, " for the second time; keep one of the two");
}

}  // namespace tessera
