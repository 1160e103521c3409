#include "tessera/core/placement.h"
