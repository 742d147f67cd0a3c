// A stand-in for the parts of torch's CUDA library that autograd asks for, with no device behind it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <new>

namespace {
constexpr auto kCuda = c10::DeviceType::CUDA;

struct DryHooks final : at::CUDAHooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
static_assert(sizeof(DryHooks) == sizeof(at::CUDAHooksInterface), "one takes the memory of the other");
} // namespace

// Does nothing if this process has a device guard for CUDA already.
extern "C" void register_dry_cuda() {
  if (c10::impl::hasDeviceGuardImpl(kCuda)) return;
  c10::impl::registerDeviceGuard(kCuda, new c10::impl::FakeGuardImpl<kCuda>());
  // Why in place: torch makes its hooks once, when it is imported, and keeps them.
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) DryHooks();
}
