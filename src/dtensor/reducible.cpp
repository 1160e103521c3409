#include "reducible.h"

#include "tessera/core/error.h"

namespace tessera::detail {

bool is_reducible(c10::ScalarType type, ReduceOp op) {
  const bool complex = c10::isComplexType(type);
  if (op == ReduceOp::kSum) return type != c10::ScalarType::Bool;
  if (op == ReduceOp::kAvg) return complex || c10::isFloatingType(type);
  return !complex;
}

void check_partials(const Layout& layout, c10::ScalarType type, std::string_view asked) {
  for (const auto& partial : layout.partial()) {
    TESSERA_CHECK(is_reducible(type, partial.op), asked, ": Partial(", to_string(partial.op),
                  ") of ", c10::toString(type),
                  " has no meaning: bool has max, min and product, integers all but avg, complex "
                  "numbers sum and avg; choose one of these, or convert");
  }
}

}  // namespace tessera::detail
