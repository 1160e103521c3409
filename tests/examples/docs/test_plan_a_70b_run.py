"""Runs the commands of docs/programs/plan_a_70b_run.md: what the page shows is what they print."""
import os
import re
import shutil
import unittest

import programs

PAGE = programs.ROOT / "docs/programs/plan_a_70b_run.md"
# The others of its commands only if asked, since each takes some seconds.
ALWAYS = (1, 3)


class PlanA70bRun(programs.InFolder):
    def test_what_the_page_shows_is_what_its_commands_print(self):
        for name, target in (("build", programs.BIN.parent), ("examples", programs.ROOT / "examples"),
                             ("tools", programs.ROOT / "tools"), (".deps", programs.ROOT / ".deps")):
            os.symlink(target, self.folder / name)
        blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", PAGE.read_text())
        self.assertEqual(len(blocks), 4)
        for number, (command, shown) in enumerate(blocks):
            if number in ALWAYS or os.environ.get("TESSERA_ALL_PLANS"):
                with self.subTest(command):
                    said = programs.succeed([shutil.which("bash"), "-ec", command], cwd=self.folder).stdout
                    for line in shown.splitlines():
                        # The last digit of a throughput depends on the processor's libm.
                        self.assertIn(re.sub(r"\d\d$", "", line), said)
        self.assertIn("Time line", (self.folder / "plan.html").read_text())
