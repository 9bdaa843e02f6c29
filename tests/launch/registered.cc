// Register one value, N, and print the values of every file if it is the last one, MAIN.
#include <flashinfer/common/registered.h>

#include <cstdio>

const flashinfer::Registered<int> kEntry(N);

#ifdef MAIN
int main() {
  int sum = 0;
  const bool stopped = flashinfer::Registered<int>::any([&](int value) { return sum += value, false; });
  const bool found = flashinfer::Registered<int>::any([](int value) { return value == 20; });
  const bool other = flashinfer::Registered<char>::any([](char) { return true; });  // a list for each type
  std::printf("%d %d %d %d\n", sum, stopped, found, other);
}
#endif
