#include "fuzz/switched_off.h"

namespace tessera::fuzz {

// What only the user can know. A line goes when what it names is mended or refused: then the test's
// search covers it.
const Choices::Off& switched_off() {
  static const Choices::Off off{
      // Four features on four ranks: a plain part of one feature is broadcast, where a part of any
      // other size is an error.
      {"heads", "2"},
  };
  return off;
}

}  // namespace tessera::fuzz
