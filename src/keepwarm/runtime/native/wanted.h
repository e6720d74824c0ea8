// The rows that a step needs to the end. The others are needed only while layers change what a sequence keeps.
#pragma once

#include <vector>

#include "attention.h"

namespace {

// The rows of a step whose logits are asked for. Only these continue once all keys and values are written.
struct Wanted {
    Step step;  // its works have only those rows
    Step rest;  // the same rows, numbered anew
    std::vector<int32_t> members, place, moved, positions;
    std::vector<Work> work;
    Wanted(const Step& s) : step(s), place(s.rows, -1) {
        for (int i = 0; i < s.outputs; i++) place[s.wanted[i]] = i, positions.push_back(s.positions[s.wanted[i]]);
        for (int i = 0; i < s.works; i++) {
            Work some = s.work[i];
            some.row = members.size();
            for (int j = 0; j < s.work[i].rows; j++)
                if (const int row = s.members[s.work[i].row + j]; place[row] >= 0) members.push_back(row), moved.push_back(place[row]);
            some.rows = members.size() - some.row;
            if (some.rows) work.push_back(some);
        }
        step.works = work.size(), step.work = work.data(), step.members = members.data();
        rest = step;
        rest.rows = s.outputs, rest.positions = positions.data(), rest.members = moved.data();
    }
    Onward onward() const { return {step.outputs, step.wanted, place.data()}; }
};

// Whether logits are asked for fewer rows than all, in rising order.
inline bool fewer(const Step& s) {
    for (int i = 1; i < s.outputs; i++)
        if (s.wanted[i] <= s.wanted[i - 1]) return false;
    return s.outputs < s.rows;
}

// Returns the last layer that changes what a sequence keeps. Behind it, rows without logits are not needed.
inline int last_kept(const Model& m) {
    int layer = m.layers - 1;
    while (m.layer[layer].shares) layer--;
    return layer;
}

}  // namespace
