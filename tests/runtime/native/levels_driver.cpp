// Runs a library of kernels without Python, for processors that are emulated: a small random Llama's logits, keys and values.
//
//     driver LIBRARY float32|bfloat16
//     driver LIBRARY blocks LIBRARY_OF_BLOCKS          compiled with -DIN_BLOCKS: every weight has another kind of blocks
//
// They must be near those of plain loops in float64, and equal to the bit in steps that end elsewhere, token by token, with
// any number of threads, and beside another sequence. Ends with 0 if they are, else with 1 and a line that says what is wrong.

#include <dlfcn.h>
#include <omp.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "levels_recurrent.h"
#include "levels_weights.h"
#include "model.h"

namespace {

#if defined(IN_BLOCKS)  // widths are those of whole blocks of a file
constexpr int HIDDEN = 256, HEADS = 8, INNER = 256, LENGTH = 70;
#else
constexpr int HIDDEN = 96, HEADS = 4, INNER = 192, LENGTH = 150;
#endif
constexpr int KV_HEADS = 2, DIM = 32, VOCAB = 200, KEEPING = 2;  // layers that keep keys and values
#if defined(IN_BLOCKS)
constexpr int BROAD_DIM = 64, TRIES = 8;  // 8 bits round wider scores too much
#elif defined(__aarch64__)  // it is emulated, and slow
constexpr int BROAD_DIM = 64, TRIES = 10;
#else
constexpr int BROAD_DIM = 512, TRIES = 24;
#endif
constexpr int ROOM = (LENGTH + UNIT - 1) / UNIT * UNIT;

int (*forward)(const Model*, Step*);
int64_t (*scratch_of)(const Model*, const Step*);
enum Mixer { ATTENTION, BROAD, SHARED, SHORT, NET, SPACE };  // SHARED reads what BROAD keeps

struct Part {
    Mixer mixer;
    Weight qkv, o, gate, up, down;
    float *convolution, *rates;  // [KERNEL, channels]; of heads with a matrix, their decays, steps, norm and `skip`
    Part(Mixer mixer)
        : mixer(mixer), qkv(reads(), HIDDEN, 1),
          o(HIDDEN, attends() ? HEADS * dim() : mixer == SHORT ? HIDDEN : NET_HEADS * NET_DIM, 1), gate(INNER, HIDDEN, 1),
          up(INNER, HIDDEN, 1), down(HIDDEN, INNER, 1), convolution(room<float>(KERNEL * channels())), rates(room<float>(224)) {
        std::normal_distribution<float> normal(0, 0.5f);
        for (int i = 0; i < KERNEL * channels(); i++) convolution[i] = normal(drawn);
        for (int i = 0; i < 224; i++) rates[i] = i < 64 ? (i < 32 ? -1.5f + i / 8.f : i / 16.f - 3) : 1 + i / 256.f;
    }
    bool has_matrices() const { return mixer == NET || mixer == SPACE; }
    bool attends() const { return mixer <= SHARED; }
    int dim() const { return mixer == ATTENTION ? DIM : BROAD_DIM; }
    int keys() const { return mixer == ATTENTION ? KV_HEADS : 1; }
    int width() const { return (HEADS + (mixer == SHARED ? 0 : 2 * keys())) * dim(); }
    int reads() const { return attends() ? width() : mixer == SHORT ? 3 * HIDDEN : NET_READS - (mixer == SPACE) * NET_HEADS; }
    int channels() const { return has_matrices() ? CHANNELS : HIDDEN; }
    int state() const { return attends() ? 0 : (KERNEL - 1) * channels() + has_matrices() * NET_HEADS * NET_KEY_DIM * NET_DIM; }
    Delta net() const {
        return {rates, rates + 32, rates + 64, mixer == SPACE ? rates + 192 : nullptr, NET_HEADS, NET_KEYS, NET_DIM, NET_KEY_DIM};
    }
};

// Layers with attention of several kinds; with plain weights, three with a state, too.
std::vector<Mixer> mixers() {
    if (kind == BLOCKS) return {ATTENTION, BROAD, SHARED};
    return {SHORT, ATTENTION, NET, SPACE, BROAD, SHARED};
}

struct Llama {
    Weight embedding{VOCAB, HIDDEN, 8}, head{VOCAB, HIDDEN, 1, true};
    std::vector<Part> parts;
    std::vector<Layer> layers;
    std::vector<double> cosine, sine;
    float *norm, *cosines, *sines, *factors;
    Model model{};

    Llama() {
        for (Mixer mixer : mixers()) parts.emplace_back(mixer);
        norm = room<float>(HIDDEN), cosines = room<float>(ROOM * DIM / 2), sines = room<float>(ROOM * DIM / 2);
        factors = room<float>(ROOM);
        for (int i = 0; i < HIDDEN; i++) norm[i] = 0.75f + (i % 7) / 14.f;
        for (int p = 0; p < ROOM; p++) factors[p] = 1 + p / 128.f;
        for (int p = 0; p < ROOM; p++)
            for (int i = 0; i < DIM / 2; i++) {
                const double angle = p * std::pow(10000.0, -2.0 * i / DIM);
                cosines[p * DIM / 2 + i] = std::cos(angle), sines[p * DIM / 2 + i] = std::sin(angle);
            }
        int kv = 0, state = 0;
        for (const Part& part : parts) {
            Layer layer{};
            layer.before = layer.before_mlp = {norm, nullptr};
            if (part.attends()) layer.kv_heads = part.keys(), layer.dim = part.dim(), layer.rotary = DIM, layer.factor = 1;
            layer.cosine = cosines, layer.sine = sines, layer.factors = factors;
            layer.shares = part.mixer == SHARED;
            layer.kv = !part.attends() ? -1 : layer.shares ? kv - 1 : kv++, layer.state = part.attends() ? -1 : state++;
            if (!part.attends()) layer.convolution = {part.convolution, nullptr, KERNEL, part.channels()};
            if (part.has_matrices()) layer.delta = part.net();
            layer.qkv = part.qkv.packed, layer.o = part.o.packed;
            layer.mlp = {nullptr, nullptr, nullptr, part.gate.packed, part.up.packed, part.down.packed, INNER};
            layers.push_back(layer);
        }
        model.layers = layers.size(), model.hidden = HIDDEN, model.heads = HEADS;
        model.inner = INNER, model.vocab = VOCAB, model.is_bf16 = kind != FLOAT32, model.activation = SILU;
        model.epsilon = 1e-5f, model.scale = 1.44269504f / std::sqrt((float)DIM);
        model.embedded = model.residual = model.logit = 1;
        model.embedding = embedding.rows(), model.head = head.packed, model.norm = {norm, nullptr}, model.layer = layers.data();
    }

    std::vector<double> normed(const std::vector<double>& x) const {
        double square = 0;
        for (double each : x) square += each * each;
        std::vector<double> y(x);
        for (int i = 0; i < HIDDEN; i++) y[i] *= norm[i] / std::sqrt(square / HIDDEN + 1e-5);
        return y;
    }

    // Logits of every row, in float64.
    std::vector<double> plain(const std::vector<int32_t>& tokens) const {
        std::vector<std::vector<double>> x;
        for (int token : tokens) x.emplace_back(embedding.plain.begin() + token * HIDDEN, embedding.plain.begin() + (token + 1) * HIDDEN);
        auto add = [](std::vector<double>& to, const std::vector<double>& from) { for (size_t i = 0; i < to.size(); i++) to[i] += from[i]; };
        std::vector<Row> kept;  // queries, keys and values of the last layer that keeps these
        for (const Part& part : parts) {
            const int dim = part.dim(), keys = part.keys();
            std::vector<std::vector<double>> q;
            for (size_t p = 0; p < x.size(); p++) {
                q.push_back(part.qkv.times(normed(x[p])));
                for (int head = 0; head < HEADS + (part.mixer == SHARED ? 0 : keys) && part.attends(); head++)
                    for (int i = 0; i < DIM / 2; i++) {
                        double &a = q[p][head * dim + i], &b = q[p][head * dim + i + DIM / 2];
                        const double c = cosines[p * DIM / 2 + i], s = sines[p * DIM / 2 + i], first = a;
                        a = first * c - b * s, b = b * c + first * s;
                    }
            }
            if (part.attends() && part.mixer != SHARED) kept = q;
            std::vector<Row> recurring;
            if (part.mixer == SHORT) recurring = short_plain(q, part.convolution);
            if (part.has_matrices()) recurring = delta_plain(q, part.convolution, part.net());
            for (size_t p = 0; p < x.size(); p++) {
                std::vector<double> mixed = part.attends() ? Row(HEADS * dim, 0.0) : recurring[p];
                for (int head = 0; head < HEADS && part.attends(); head++) {
                    const int k = (HEADS + head / (HEADS / keys)) * dim, v = k + keys * dim;
                    double total = 0;
                    for (size_t t = 0; t <= p; t++) {
                        double score = 0;
                        for (int d = 0; d < dim; d++) score += q[p][head * dim + d] * kept[t][k + d];
                        const double weight = std::exp(score * factors[p] / std::sqrt((double)DIM));
                        total += weight;
                        for (int d = 0; d < dim; d++) mixed[head * dim + d] += weight * kept[t][v + d];
                    }
                    for (int d = 0; d < dim; d++) mixed[head * dim + d] /= total;
                }
                add(x[p], part.o.times(mixed));
                const std::vector<double> h = normed(x[p]), up = part.up.times(h);
                std::vector<double> gate = part.gate.times(h);
                for (int i = 0; i < INNER; i++) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
                add(x[p], part.down.times(gate));
            }
        }
        std::vector<double> logits;
        for (const auto& each : x) {
            const std::vector<double> row = head.times(normed(each));
            logits.insert(logits.end(), row.begin(), row.end());
        }
        return logits;
    }
};

// Keys and values of one sequence, its states, and its logits so far.
struct Sequence {
    std::vector<char> memory;
    std::vector<float> logits;
    Region region{};
    std::vector<std::vector<float>> states;
    std::vector<float*> state;
    std::vector<Plane> planes;
    int64_t size = 0;
    Sequence(const Llama& llama) {
        for (const Part& part : llama.parts)
            if (!part.attends()) states.emplace_back(part.state(), 0.f);
        for (auto& each : states) state.push_back(each.data());
        memory.resize(2 * KEEPING * KV_HEADS * ROOM * BROAD_DIM * 4 + 64);
        region.base = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
        for (const Part& part : llama.parts)
            for (int kv = 0; kv < 2 && part.attends() && part.mixer != SHARED; kv++) {
                const int64_t head = (int64_t)ROOM * part.dim() * (kind == FLOAT32 ? 4 : 2);
                planes.push_back({region.base + size, head}), size += part.keys() * head;
            }
        region.plane = planes.data();
    }
    std::string bytes() const { return {region.base, (size_t)size}; }
};

// Runs a step, with two other heads, for all logits and for its rows' largest ones alone: these and their places must be
// those among all. The sequences' states stay as they were.
void largest(const Llama& llama, Step s, const std::vector<Sequence*>& of) {
    std::vector<std::vector<std::vector<float>>> before;
    for (const Sequence* each : of) before.push_back(each->states);
    const auto again = [&] {
        for (size_t i = 0; i < of.size(); i++)
            for (size_t j = 0; j < before[i].size(); j++) std::copy(before[i][j].begin(), before[i][j].end(), of[i]->state[j]);
    };
    static const Weight head(VOCAB, HIDDEN, 1, true), other(VOCAB, HIDDEN, 1, true);
    for (const Weight* each : {&head, &other}) {
        Model model = llama.model;
        model.head = each->packed, model.errors = each->errors;
        std::vector<float> every(s.outputs * VOCAB), some(every.size());
        for (int only = 0; only < 2; only++) {
            s.largest = only, s.logits = only ? some.data() : every.data(), s.scratch = room<float>(scratch_of(&model, &s));
            forward(&model, &s), again();
            std::free(s.scratch);
        }
        for (int row = 0; row < s.outputs; row++) {
            const float *all = every.data() + row * VOCAB, *few = some.data() + row * VOCAB;
            const bool found = std::max_element(all, all + VOCAB) - all == std::max_element(few, few + VOCAB) - few;
            for (int i = 0; i < VOCAB; i++)
                if (!found || (few[i] != all[i] && few[i] != -INFINITY)) std::puts("wrong: the largest logit"), std::exit(1);
        }
    }
}

// Runs positions [start, end) of some sequences in one step.
void step(const Llama& llama, const std::vector<Sequence*>& of, const std::vector<const std::vector<int32_t>*>& tokens, int start,
          int end, int threads) {
    const int each = end - start, units = (end + UNIT - 1) / UNIT, pages_of = units * (UNIT / PAGE);
    std::vector<int32_t> ids, positions, members, wanted;
    std::vector<int64_t> slots, pages;
    std::vector<Region> regions;
    std::vector<Work> works;
    for (size_t i = 0; i < of.size(); i++) {
        works.push_back({0, units, (int32_t)members.size(), each, (int64_t)pages.size()});
        regions.push_back(of[i]->region);
        for (int page = 0; page < pages_of; page++) pages.push_back((int64_t)i << 32 | page * PAGE);
        for (int p = start; p < end; p++) {
            ids.push_back((*tokens[i])[p]), positions.push_back(p), slots.push_back((int64_t)i << 32 | p);
            members.push_back(members.size()), wanted.push_back(wanted.size());
        }
    }
    std::vector<float> logits(ids.size() * VOCAB);
    std::vector<Run> runs;
    for (size_t i = 0; i < of.size(); i++) runs.push_back({(int32_t)i * each, each, 0, 0, of[i]->state.data()});
    Step s{};
    s.rows = s.outputs = ids.size(), s.works = works.size(), s.threads = threads, s.last = llama.model.layers;
    s.run = runs.data(), s.runs = kind == BLOCKS ? 0 : runs.size();
    s.tokens = ids.data(), s.positions = positions.data(), s.slots = slots.data(), s.regions = regions.data();
    s.pages = pages.data(), s.work = works.data(), s.members = members.data(), s.wanted = wanted.data(), s.logits = logits.data();
    s.scratch = room<float>(scratch_of(&llama.model, &s));
    if ((kind == BLOCKS || deep > 1) && ids.size() <= 4) largest(llama, s, of);
    if (forward(&llama.model, &s)) std::puts("the step did not run"), std::exit(1);
    std::free(s.scratch);
    for (size_t i = 0; i < of.size(); i++)
        of[i]->logits.insert(of[i]->logits.end(), logits.begin() + i * each * VOCAB, logits.begin() + (i + 1) * each * VOCAB);
}

bool same(const Sequence& a, const Sequence& b) {
    return a.bytes() == b.bytes() && a.states == b.states && a.logits.size() == b.logits.size() &&
           !std::memcmp(a.logits.data(), b.logits.data(), a.logits.size() * sizeof(float));
}

int wrong(const std::string& what) {
    std::printf("wrong: %s\n", what.c_str());
    return 1;
}

}  // namespace

int main(int count, char** given) {
#if defined(__linux__) && defined(__x86_64__)
    syscall(SYS_arch_prctl, 0x1023, 18);  // the system lets a program use the matrix units when it asks (build.py)
#endif
    dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);  // which the library names nowhere: a process's torch brings it
    void* library = dlopen(given[1], RTLD_NOW);
    if (!library) return wrong(dlerror());
    const std::string named = given[2];
    kind = named == "float32" ? FLOAT32 : named == "bfloat16" ? BFLOAT16 : BLOCKS;
    if (count > 3) {
        void* blocks = dlopen(given[3], RTLD_NOW);
        if (!blocks) return wrong(dlerror());
        panel_bytes = (decltype(panel_bytes))dlsym(blocks, "keepwarm_panel_bytes");
        pack = (decltype(pack))dlsym(blocks, "keepwarm_pack");
        widened = (decltype(widened))dlsym(blocks, "keepwarm_widen");
    }
    forward = (decltype(forward))dlsym(library, "keepwarm_forward");
    scratch_of = (decltype(scratch_of))dlsym(library, "keepwarm_scratch");
    deep = kind == BFLOAT16 ? ((int (*)())dlsym(library, "keepwarm_deep"))() : 1;
    const Llama llama;

    std::vector<int32_t> tokens(LENGTH), others(LENGTH);
    for (auto* each : {&tokens, &others})
        for (auto& token : *each) token = drawn() % VOCAB;
    Sequence whole(llama);
    step(llama, {&whole}, {&tokens}, 0, LENGTH, 1);

    double off = 0, largest = 0;
    const std::vector<double> exact = llama.plain(tokens);
    for (size_t i = 0; i < exact.size(); i++) off = std::max(off, std::fabs(exact[i] - whole.logits[i])), largest = std::max(largest, std::fabs(exact[i]));
    std::printf("off float64 by %.2g of the largest logit\n", off / largest);
    const double bound = kind == FLOAT32 ? 2e-5 : kind == BFLOAT16 ? 0.05 : 0.1;
    if (!(off < bound * largest)) return wrong("logits are not near float64's");

    for (int number = 0; number < TRIES; number++) {
        Sequence parts(llama);
        const int threads = 1 + number % 3, most = number < 2 ? 1 : 1 + (int)(drawn() % 100);
        std::string ends;
        for (int start = 0; start < LENGTH;) {
            const int end = std::min(LENGTH, start + 1 + (int)(drawn() % most));
            step(llama, {&parts}, {&tokens}, start, end, threads);
            start = end, ends += " " + std::to_string(end);
        }
        if (!same(whole, parts)) return wrong(std::to_string(threads) + " threads, steps that end at" + ends);
        Sequence beside(llama), again(llama);
        step(llama, {&beside, &again}, {&others, &tokens}, 0, LENGTH / 2, threads);
        step(llama, {&again, &beside}, {&tokens, &others}, LENGTH / 2, LENGTH, threads);
        if (!same(whole, again)) return wrong("another sequence in the same step");
    }
    return 0;
}
