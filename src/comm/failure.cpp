// SPDX-License-Identifier: Apache-2.0
#include "comm/failure.h"

#include <new>

namespace farspan {

RankFailure failure_of(int rank, std::exception_ptr exception) {
  try {
    std::rethrow_exception(std::move(exception));
  } catch (const PeerFailure& error) {
    return {rank, error.kind(), error.what(), true, {}, false};
  } catch (const WaitFailure& error) {
    return {rank, error.kind(), error.what(), false, error.missing(), false};
  } catch (const Error& error) {
    return {rank, error.kind(), error.what(), false, {}, false};
  } catch (const std::bad_alloc&) {
    return {
        rank, ErrorKind::memory, "the system has no more memory to give; see what fits with farspan plan", false, {},
        false};
  } catch (const std::exception& error) {
    return {rank, ErrorKind::internal, error.what(), false, {}, false};
  } catch (...) {
    return {rank, ErrorKind::internal, "an exception of unknown type", false, {}, false};
  }
}

void throw_error(ErrorKind kind, const std::string& message) {
  switch (kind) {
    case ErrorKind::internal:
      throw InternalError(message);
    case ErrorKind::config:
      throw ConfigError(message);
    case ErrorKind::data:
      throw DataError(message);
    case ErrorKind::memory:
      throw MemoryError(message);
    case ErrorKind::communication:
      throw CommunicationError(message);
  }
  throw Error(kind, message);
}

}  // namespace farspan
