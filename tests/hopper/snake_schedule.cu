// Take the numbers of work lists as the blocks of a kernel would, on the host: each number once, and how
// evenly.
#include <flashinfer/cuda/attention/sm90/work.cuh>

#include <algorithm>
#include <cstdio>
#include <vector>

using flashinfer::cuda::sm90::SnakeSchedule;

// Return the load of the busiest block divided by the mean. Items of a section have lengths `longest` down to
// 1.
static double busiest(int section, int sections, int blocks, int longest) {
  std::vector<double> load(blocks);
  double all = 0;
  for (int block = 0; block < blocks; ++block) {
    SnakeSchedule schedule(section, sections, block, blocks);
    int number;
    while (schedule.next(number)) load[block] += 1 + longest * (1.0 - double(number % section) / section);
    all += load[block];
  }
  return *std::max_element(load.begin(), load.end()) / (all / blocks);
}

int main() {
  for (int blocks : {1, 2, 7, 131, 132}) {
    for (int section : {0, 1, 5, 127, 128, 131, 132, 133, 256, 264, 300, 1000}) {
      for (int sections : {1, 2, 3, 8, 32}) {
        std::vector<int> taken(section * sections);
        for (int block = 0; block < blocks; ++block) {
          SnakeSchedule schedule(section, sections, block, blocks);
          int number;
          while (schedule.next(number)) {
            if (number < 0 || number >= section * sections) return std::printf("number %d\n", number), 1;
            ++taken[number];
          }
        }
        for (int times : taken) {
          if (times != 1) return std::printf("%d blocks, %d x %d: %d times\n", blocks, sections, section, times), 1;
        }
      }
    }
  }
  // Two heads, then one, of 128 causal tiles: a head dimension of 256, 16,384 tokens.
  std::printf("%.3f %.3f\n", busiest(256, 16, 132, 128), busiest(128, 32, 132, 128));
  return 0;
}
