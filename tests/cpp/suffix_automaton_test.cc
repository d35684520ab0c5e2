#include "llmopt/suffix_automaton.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace llmopt {
namespace {

using Text = std::vector<int64_t>;

bool ends_with(const Text& text, int end, std::span<const int64_t> suffix) {
  const int length = static_cast<int>(suffix.size());
  return end + 1 >= length && std::equal(suffix.begin(), suffix.end(), text.begin() + end + 1 - length);
}

// The longest suffix of `tokens` that ends in the text at `last` or before, and the latest such place.
SuffixMatch longest(const Text& text, std::span<const int64_t> tokens, int last) {
  for (size_t length = tokens.size(); length > 0; --length) {
    for (int end = last; end >= 0; --end) {
      if (ends_with(text, end, tokens.last(length))) return {static_cast<int32_t>(length), end};
    }
  }
  return {};
}

// What a period from the match to the end of the text goes on with, up to a token below 0.
Text continued(Text text, SuffixMatch match, int count) {
  const size_t size = text.size();
  if (match.length == 0) return {};
  for (int index = 0; index < count; ++index) {
    const int64_t token = text[match.end + 1 + index];
    if (token < 0) break;
    text.push_back(token);
  }
  return Text(text.begin() + static_cast<ptrdiff_t>(size), text.end());
}

// Random tokens; parts of the text come again, so that long matches exist.
void grow(Text& text, std::mt19937& random, int alphabet, int separators, size_t size) {
  while (text.size() < size) {
    if (!text.empty() && random() % 4 == 0) {
      const size_t begin = random() % text.size();
      const size_t end = std::min(text.size(), begin + 1 + random() % 9);
      const Text part(text.begin() + static_cast<ptrdiff_t>(begin), text.begin() + static_cast<ptrdiff_t>(end));
      text.insert(text.end(), part.begin(), part.end());
    } else if (separators > 0 && random() % 12 == 0) {
      text.push_back(-1 - static_cast<int64_t>(random() % separators));
    } else {
      text.push_back(static_cast<int64_t>(random() % alphabet));
    }
  }
  text.resize(size);
}

TEST(SuffixAutomaton, TheLongestSuffixThatOccurredBeforeIsFoundAtItsLatestPlace) {
  std::mt19937 random(1);
  for (const int alphabet : {1, 2, 3, 5, 40}) {
    for (int repeat = 0; repeat < 6; ++repeat) {
      Text text;
      SuffixAutomaton automaton;
      for (size_t size = 0; size < 60;) {
        size += 1 + random() % (repeat + 1);  // tokens come singly and in groups
        grow(text, random, alphabet, 0, size);
        automaton.extend(std::span(text).subspan(automaton.size()));
        ASSERT_EQ(automaton.size(), static_cast<int>(text.size()));
        const std::span<const int64_t> all(text);
        const SuffixMatch wanted = longest(text, all.subspan(1), static_cast<int>(text.size()) - 2);
        const SuffixMatch found = automaton.last();
        ASSERT_EQ(found.length, wanted.length) << "alphabet " << alphabet << ", size " << size;
        ASSERT_EQ(found.end, wanted.end) << "alphabet " << alphabet << ", size " << size;
        for (const int count : {0, 1, 7, 100}) {
          ASSERT_EQ(automaton.follow(found, count), continued(text, wanted, count));
        }
      }
    }
  }
}

TEST(SuffixAutomaton, TokensInGroupsMakeWhatTheyMakeSingly) {
  std::mt19937 random(2);
  Text text;
  grow(text, random, 3, 2, 400);
  SuffixAutomaton singly, at_once;
  for (const int64_t& token : text) singly.extend({&token, 1});
  at_once.extend(text);
  EXPECT_EQ(singly.last().length, at_once.last().length);
  EXPECT_EQ(singly.last().end, at_once.last().end);
  EXPECT_EQ(singly.follow(singly.last(), 50), at_once.follow(at_once.last(), 50));
  for (size_t begin = 0; begin < text.size(); begin += 7) {
    const std::span<const int64_t> part =
        std::span<const int64_t>(text).subspan(begin, std::min<size_t>(9, text.size() - begin));
    EXPECT_EQ(singly.find(part).length, at_once.find(part).length);
    EXPECT_EQ(singly.find(part).end, at_once.find(part).end);
  }
}

TEST(SuffixAutomaton, AnotherTextIsFoundByItsLongestSuffix) {
  std::mt19937 random(3);
  for (const int alphabet : {1, 2, 4, 30}) {
    Text text;
    SuffixAutomaton automaton;
    for (size_t size = 1; size < 64; size += 1 + random() % 9) {  // past 64 suffixes an older place may come
      grow(text, random, alphabet, 3, size);
      automaton.extend(std::span(text).subspan(automaton.size()));
      for (int repeat = 0; repeat < 20; ++repeat) {
        Text asked;
        grow(asked, random, alphabet + 1, 0, 1 + random() % 6);  // with a token that the text has not
        if (repeat % 2) {
          const size_t end = 1 + random() % text.size();
          asked.assign(text.begin() + static_cast<ptrdiff_t>(end - std::min<size_t>(end, 5)),
                       text.begin() + static_cast<ptrdiff_t>(end));
        }
        const SuffixMatch wanted = longest(text, asked, static_cast<int>(text.size()) - 1);
        const SuffixMatch found = automaton.find(asked);
        ASSERT_EQ(found.length, wanted.length);
        ASSERT_EQ(found.end, wanted.end);
        ASSERT_EQ(automaton.follow(found, 9), wanted.end + 1 == automaton.size() ? Text{} : continued(text, wanted, 9));
      }
    }
  }
}

TEST(SuffixAutomaton, OfPrefixesWithManySuffixesAnOlderPlaceMayBeNamedButATrueOne) {
  std::mt19937 random(4);
  Text text(300, 7);  // every suffix is a state: more than the latest place is passed on to
  grow(text, random, 2, 0, 420);
  text.push_back(0);
  text.insert(text.end(), 300, 7);
  SuffixAutomaton automaton;
  for (const int64_t& token : text) {
    automaton.extend({&token, 1});
    const SuffixMatch found = automaton.last();
    const std::span<const int64_t> all(text.data(), automaton.size());
    if (found.length > 0) {
      ASSERT_LT(found.end, automaton.size() - 1);
      ASSERT_TRUE(ends_with(text, found.end, all.last(found.length)));
    }
  }
  EXPECT_EQ(automaton.last().length, 300);
  for (int length = 1; length <= 300; length += 13) {
    const SuffixMatch found = automaton.find(std::span<const int64_t>(text).last(length));
    ASSERT_EQ(found.length, length);
    ASSERT_TRUE(ends_with(text, found.end, std::span<const int64_t>(text).last(length)));
  }
}

TEST(SuffixAutomaton, NothingIsFoundInNothing) {
  SuffixAutomaton automaton;
  EXPECT_EQ(automaton.size(), 0);
  EXPECT_EQ(automaton.last().length, 0);
  EXPECT_EQ(automaton.last().end, -1);
  EXPECT_EQ(automaton.find(Text{1, 2}).length, 0);
  EXPECT_TRUE(automaton.follow(automaton.last(), 4).empty());
  automaton.extend(Text{});
  EXPECT_EQ(automaton.size(), 0);
  automaton.extend(Text{5});
  EXPECT_EQ(automaton.last().length, 0);
  EXPECT_EQ(automaton.find(Text{5}).end, 0);
  EXPECT_TRUE(automaton.follow(automaton.find(Text{5}), 4).empty());  // nothing came behind it yet
}

TEST(SuffixAutomaton, TheLargestAndSmallestTokensAreToldApart) {
  const int64_t large = INT64_MAX, small = INT64_MIN;
  SuffixAutomaton automaton;
  automaton.extend(Text{large, 1, large - 1, 2, large});
  EXPECT_EQ(automaton.last().end, 0);
  EXPECT_EQ(automaton.follow(automaton.last(), 3), (Text{1, large - 1, 2}));
  automaton.extend(Text{small, large - 1});
  EXPECT_EQ(automaton.last().end, 2);
  EXPECT_EQ(automaton.follow(automaton.last(), 9), (Text{2, large}));
}

TEST(SuffixAutomaton, MemoryGrowsWithTheTextAndNotFaster) {
  std::mt19937 random(5);
  for (const int alphabet : {1, 2, 50000}) {
    SuffixAutomaton automaton;
    Text text(20000);
    for (int64_t& token : text) token = static_cast<int64_t>(random() % alphabet);
    automaton.extend(text);
    EXPECT_LT(automaton.num_bytes(), 300u * text.size());
    EXPECT_GT(automaton.num_bytes(), sizeof(int64_t) * text.size());
  }
}

}  // namespace
}  // namespace llmopt
