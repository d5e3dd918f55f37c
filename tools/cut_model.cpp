// A fluid model of a launch: blocks of K and V streams on SMs, which share what the device reads. For
// tools/cut_model.py, which explains the parameters.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

struct Parameters {
  double idle, busy, device;  // KB/us: what a block can read alone, and beside as many as fill the device
  double spread;              // how far SMs differ in speed
  double launch;              // us, as are all that follow
  double first_begin, later_begin, end, cluster_end, cut_end, merge, eight_parts, nobody;
};

enum Phase { kBegins, kStreams, kEnds };

struct Block {
  int sm, cluster, part;
  Phase phase;
  double left;  // us, or KB while it streams
};

// SMs' speeds around 1, the same in every run.
std::vector<double> draw_speeds(int sms, double spread) {
  std::vector<double> speeds;
  uint32_t state = 12345;
  for (int sm = 0; sm < sms; ++sm) {
    double sum = 0;  // of six uniform numbers: nearly normal, deviation 0.71
    for (int i = 0; i < 6; ++i) {
      state = state * 1664525u + 1013904223u;
      sum += (state >> 8) / 16777216.0 - 0.5;
    }
    speeds.push_back(std::max(0.5, 1 + 1.41 * spread * sum));
  }
  return speeds;
}

class Launch {
 public:
  Launch(const Parameters& p, int sms, int resident, int splits, int clusters, const int32_t* first_part,
         const double* kilobytes, const int32_t* request, int requests, const int32_t* parts_of)
      : p_(p),
        resident_(resident),
        splits_(splits),
        clusters_(clusters),
        first_part_(first_part),
        kilobytes_(kilobytes),
        request_(request),
        parts_of_(parts_of),
        arrived_(requests),
        blocks_on_(sms),
        speeds_(draw_speeds(sms, p.spread)) {}

  double run() {
    place_clusters();
    while (!blocks_.empty()) {
      const std::vector<double> rates = rates_now();
      double step = 1e30;
      for (size_t i = 0; i < blocks_.size(); ++i) step = std::min(step, blocks_[i].left / rates[i]);
      now_ += step;
      size_t kept = 0;
      for (size_t i = 0; i < blocks_.size(); ++i) {
        Block block = blocks_[i];
        block.left -= rates[i] * step;
        if (block.left > 1e-9 || goes_on(block)) blocks_[kept++] = block;
      }
      if (kept < blocks_.size()) {
        blocks_.resize(kept);
        place_clusters();
      }
    }
    return finish_ + p_.launch;
  }

 private:
  // In order, each on the SMs that hold the fewest blocks.
  void place_clusters() {
    for (; next_ < clusters_; ++next_) {
      std::vector<int> chosen;
      for (int i = 0; i < splits_; ++i) {
        const int sm =
            static_cast<int>(std::min_element(blocks_on_.begin(), blocks_on_.end()) - blocks_on_.begin());
        if (blocks_on_[sm] >= resident_) break;
        ++blocks_on_[sm];
        chosen.push_back(sm);
      }
      if (static_cast<int>(chosen.size()) < splits_) {
        for (const int sm : chosen) --blocks_on_[sm];
        return;
      }
      const double begin = now_ == 0 ? p_.first_begin : p_.later_begin;
      for (const int sm : chosen) blocks_.push_back({sm, next_, first_part_[next_], kBegins, begin});
    }
  }

  std::vector<double> rates_now() const {
    std::vector<double> rates(blocks_.size(), 1.0);
    double speed = 0;  // of all blocks that stream
    for (const Block& block : blocks_) speed += block.phase == kStreams ? speeds_[block.sm] : 0;
    const double load = std::min(1.0, speed * p_.busy / p_.device);
    const double each = std::min(p_.idle + (p_.busy - p_.idle) * load, p_.device / std::max(speed, 1e-9));
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (blocks_[i].phase == kStreams) rates[i] = each * speeds_[blocks_[i].sm];
    }
    return rates;
  }

  // The block's next phase or part; false where it leaves.
  bool goes_on(Block& block) {
    const int request = request_[block.part];  // of a cut one, else -1
    if (block.phase == kBegins && kilobytes_[block.part] >= 0) {
      block.phase = kStreams;
      block.left = std::max(kilobytes_[block.part], 1e-6);
      return true;
    }
    if (block.phase == kStreams) {
      block.phase = kEnds;
      block.left = p_.end + (splits_ > 1 ? p_.cluster_end : 0) + (request >= 0 ? p_.cut_end : 0);
      return true;
    }
    finish_ = std::max(finish_, now_);
    if (block.phase == kEnds && request >= 0 && ++arrived_[request] == parts_of_[request] * splits_) {
      finish_ = std::max(finish_, now_ + p_.merge + p_.eight_parts * ((parts_of_[request] + 7) / 8));
    }
    if (++block.part < first_part_[block.cluster + 1]) {
      block.phase = kBegins;
      block.left = kilobytes_[block.part] < 0 ? p_.nobody : p_.later_begin;
      return true;
    }
    --blocks_on_[block.sm];
    return false;
  }

  const Parameters p_;
  const int resident_, splits_, clusters_;
  const int32_t* const first_part_;
  const double* const kilobytes_;
  const int32_t* const request_;
  const int32_t* const parts_of_;
  std::vector<int> arrived_, blocks_on_;
  const std::vector<double> speeds_;
  std::vector<Block> blocks_;
  int next_ = 0;
  double now_ = 0, finish_ = 0;
};

}  // namespace

// Microseconds. Cluster c takes the parts from first_part[c] to first_part[c + 1]; each has so many KB a
// block (below 0: nobody's) and the number of its request where that is cut (else -1), which has parts_of
// parts.
extern "C" double simulate(const Parameters* parameters, int32_t sms, int32_t resident, int32_t splits,
                           int32_t clusters, const int32_t* first_part, const double* kilobytes,
                           const int32_t* request, int32_t requests, const int32_t* parts_of) {
  return Launch(*parameters, sms, resident, splits, clusters, first_part, kilobytes, request, requests,
                parts_of)
      .run();
}
