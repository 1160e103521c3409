#include "tessera/dtensor/meta_factory.h"

namespace tessera::detail {
namespace {

thread_local bool meta_here = false;

}  // namespace

MetaFactoryGuard::MetaFactoryGuard() : outer_(meta_here), guard_(c10::DispatchKey::Fake) {
  meta_here = true;
}
MetaFactoryGuard::~MetaFactoryGuard() {
  meta_here = outer_;
}

bool makes_meta_tensors() {
  return meta_here;
}

}  // namespace tessera::detail
