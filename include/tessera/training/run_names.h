#pragma once

#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// What messages call a program and its options: a program whose flags bear the options' names says
/// {"my_train", "--"}.
struct RunNames {
  std::string program = "training";
  std::string dashes = "";  ///< in front of an option's name
};

}  // namespace tessera::training
TESSERA_API_END
