// SPDX-License-Identifier: Apache-2.0
// Tensors for code that runs on the CPU: a device's own memory where the CPU can reach it, a copy of it elsewhere.
#pragma once

#include <memory>

#include "device/device.h"
#include "tensor/tensor.h"

namespace farspan {

// Host memory of a contiguous tensor's size, or the tensor itself where its device is a CPU (or computes nothing).
class HostTensor {
 public:
  HostTensor(Device& device, const Tensor& tensor) : device_(device), tensor_(tensor), host_(tensor) {
    if (!device.on_cuda()) return;
    FARSPAN_CHECK(tensor.contiguous(), "host access: {} is strided, expected contiguous", tensor.shape().str());
    copy_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(tensor.bytes()));
    host_ = Tensor(copy_.get(), tensor.dtype(), tensor.shape());
  }
  const Tensor& tensor() const { return host_; }

 protected:
  Device& device_;
  Tensor tensor_;
  Tensor host_;
  std::unique_ptr<std::byte[]> copy_;
};

// The values of a tensor once all that was queued has run.
class HostValues : public HostTensor {
 public:
  HostValues(Device& device, const Tensor& tensor) : HostTensor(device, tensor) {
    if (copy_) copy_to_host(device, tensor.raw(), copy_.get(), tensor.bytes());
  }
};

// A tensor that the CPU fills, all of it, before send() brings it to the device.
class HostFilled : public HostTensor {
 public:
  using HostTensor::HostTensor;
  void send() {
    if (copy_) copy_to_device(device_, copy_.get(), tensor_.raw(), tensor_.bytes());
  }
};

}  // namespace farspan
