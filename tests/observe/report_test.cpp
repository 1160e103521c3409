#include "tessera/observe/report.h"

#include <gtest/gtest.h>

#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::observe {
namespace {

using ::testing::Test;

class ReportTest : public Test {
 protected:
  std::string Written(const Report& report) {
    write_report(report, folder_ / "report.html");
    return testing::ReadFile(folder_ / "report.html");
  }

  /// A run of `steps` steps whose loss falls.
  static Report Run(int steps) {
    Report report{.title = "a run"};
    for (int step = 1; step <= steps; ++step) {
      StepMetrics metrics;
      metrics.step = step;
      metrics.loss = 5.0 / step;
      metrics.grad_norm = 100.0 / step;
      metrics.step_time_s = 0.25;
      metrics.tokens_per_s = 1000;
      metrics.peak_memory_bytes = 123 << 20;
      metrics.comm = {{{"dp", "all_gather"}, {4, 3072}}, {{"tp", "all_reduce"}, {1, 1024}}};
      report.steps.push_back(metrics);
    }
    return report;
  }

  testing::TemporaryFolder folder_;
};

std::size_t Count(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != text.npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

TEST_F(ReportTest, FetchesNothing) {
  const auto html = Written(Run(20));
  EXPECT_FALSE(std::regex_search(html, std::regex("https?:|<script|<link|@import|src=|url\\(")));
}

TEST_F(ReportTest, DrawsFourCurves) {
  const auto html = Written(Run(20));
  EXPECT_EQ(Count(html, "<svg "), 4u);
  for (const std::string title : {"Loss", "Gradient norm", "Throughput", "Peak memory"}) {
    EXPECT_NE(html.find("<h3>" + title), html.npos) << title;
  }
}

TEST_F(ReportTest, HoverTextsGiveStepAndValue) {
  EXPECT_CONTAINS(Written(Run(20)), "<title>step 4: 1.25 nats per token</title>");
}

TEST_F(ReportTest, DrawsTheHeldOutLossWhereThereIsOne) {
  auto report = Run(4);
  report.steps[1].eval_loss = 2.5;
  report.steps[3].eval_loss = 2.25;
  const auto html = Written(report);
  EXPECT_EQ(Count(html, "<svg "), 5u);
  EXPECT_CONTAINS(html, "<h3>Held-out loss");
  EXPECT_CONTAINS(html, "<title>step 2: 2.5 nats per token</title>");
}

TEST_F(ReportTest, ClosesEveryElement) {
  auto report = Run(200);
  report.configuration = {{"--dp", "2"}};
  report.sharding = {{"w", {4, 4}, "dp: Shard(0)", {2, 4}, 32}};
  report.sample = "text";
  const auto html = Written(report);
  for (const std::string tag : {"svg", "section", "div", "table", "tr", "td", "th", "g", "figure",
                                "dl", "dt", "dd", "h2", "h3", "span", "pre", "main", "text"}) {
    EXPECT_EQ(Count(html, "<" + tag + ">") + Count(html, "<" + tag + " "),
              Count(html, "</" + tag + ">"))
        << tag;
  }
}

TEST_F(ReportTest, EscapesWhatComesFromOutside) {
  auto report = Run(1);
  report.title = "<b>&\"'";
  report.sample = "a<script>\xff\x01\n";
  report.configuration = {{"--x", "<i>"}};
  const auto html = Written(report);
  EXPECT_CONTAINS(html, "<h1>&lt;b&gt;&amp;&quot;&#39;</h1>");
  EXPECT_CONTAINS(html, "<pre>a&lt;script&gt;\xef\xbf\xbd\xef\xbf\xbd\n</pre>");
  EXPECT_CONTAINS(html, "<dd>&lt;i&gt;</dd>");
}

TEST_F(ReportTest, KeepsUtf8AndReplacesWhatIsNot) {
  Report report{.title = "t"};
  report.sample =
      "\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82|\xc0\xaf|\xed\xa0\x80|\xf4\x90\x80\x80|\xe2\x82";
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_CONTAINS(Written(report), "\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82|" + bad + bad + "|" + bad +
                                       bad + bad + "|" + bad + bad + bad + bad + "|" + bad + bad +
                                       "<");
}

TEST_F(ReportTest, ListsCommunicationOfTheLastStep) {
  const auto html = Written(Run(3));
  EXPECT_CONTAINS(html, "<td>dp</td><td>all_gather</td><td class=\"n\">4</td>");
  EXPECT_CONTAINS(html, "title=\"3,072 bytes\">3.00 KiB");
  EXPECT_CONTAINS(html, "title=\"4,096 bytes\">4.00 KiB");  // the total
}

TEST_F(ReportTest, ListsTheShardingOfEachParameter) {
  Report report{.title = "t"};
  report.sharding = {{"model.norm.weight", {16}, "dp: Shard(0), tp: Replicate()", {8}, 32},
                     {"scalar", {}, "-", {}, 4}};
  const auto html = Written(report);
  EXPECT_NE(html.find("model.norm.weight</td><td class=\"n\">16</td>"
                      "<td>dp: Shard(0), tp: Replicate()</td><td class=\"n\">8</td>"),
            html.npos);
  EXPECT_CONTAINS(html, "17 parameters in 2 tensors, 36 B on rank 0");
}

TEST_F(ReportTest, StandsWithoutSteps) {
  const auto html = Written({.title = "nothing"});
  EXPECT_CONTAINS(html, "no steps were run");
  EXPECT_EQ(html.find("<svg"), html.npos);
}

TEST_F(ReportTest, LeavesOutValuesThatAreNotFinite) {
  auto report = Run(3);
  report.steps[1].loss = std::numeric_limits<double>::quiet_NaN();
  for (auto& step : report.steps) {
    step.grad_norm = std::numeric_limits<double>::infinity();
  }
  const auto html = Written(report);
  EXPECT_FALSE(std::regex_search(html, std::regex("(points|cx|cy|y1)=\"[^\"]*(nan|inf)")));
  EXPECT_CONTAINS(html, "no finite values");
}

TEST_F(ReportTest, DrawsConstantAndSinglePoints) {
  for (const int steps : {1, 2}) {
    auto report = Run(steps);
    for (auto& step : report.steps) {
      step.loss = 0;
    }
    EXPECT_FALSE(std::regex_search(Written(report), std::regex("\"[^\"]*(nan|inf)[ \",]")));
  }
}

TEST_F(ReportTest, StaysSmallForALongRun) {
  EXPECT_LT(Written(Run(100'000)).size(), 400'000u);
}

TEST_F(ReportTest, NamesAFileThatCannotBeWritten) {
  EXPECT_ERROR(write_report({.title = "t"}, folder_ / "missing/report.html"), "cannot write");
}

TEST_F(ReportTest, LeavesNothingBehindWhenItFails) {
  std::filesystem::create_directories(folder_ / "report.html/taken");
  EXPECT_ERROR(write_report({.title = "t"}, folder_ / "report.html"), "cannot put in place");
  EXPECT_EQ(folder_.files(), std::vector<std::string>{"report.html"});
}

}  // namespace
}  // namespace tessera::observe
