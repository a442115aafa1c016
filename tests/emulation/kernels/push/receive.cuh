// Stands in for ffi/kernels/push/receive.cuh, which kernels/small/route.cuh includes for its users: none of
// it is emulated.
#pragma once
