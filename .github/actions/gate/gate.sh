#!/usr/bin/env bash
# Runs the gate from the inputs of action.yml, which come as variables GATE_*, and passes on its verdict: as outputs, in the job's
# summary, as a comment if asked, and as exit code. The inputs are data: none of them becomes part of a command line of this script
# except GATE_COMMAND and GATE_SETUP, which are command lines.
set -uo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
words=(--fail-if-slower "$GATE_FAIL_IF_SLOWER" --budget-minutes "$GATE_BUDGET_MINUTES" --comment "$folder/comment.md" --json)
[ -z "${GATE_MEASURE:-}" ] || words+=(--measure "$GATE_MEASURE")
[ -z "${GATE_SETUP:-}" ] || words+=(--setup "$GATE_SETUP")
# "$@" takes the option that the gate adds to a command of pytest-benchmark, and is nothing otherwise.
command=(bash -c "${GATE_COMMAND%$'\n'}"' "$@"' gate)

"${TRAINSTEP:-trainstep}" gate "$GATE_BASE" "$GATE_HEAD" "${words[@]}" -- "${command[@]}" >"$folder/result.json"
code=$?

if [ -f "$folder/comment.md" ]; then
  cat "$folder/comment.md" >>"$GITHUB_STEP_SUMMARY"
  cat "$folder/comment.md"
  python3 - "$folder/result.json" >>"$GITHUB_OUTPUT" <<'PYTHON'
import json, sys
result = json.load(open(sys.argv[1]))
cells = sorted(result["cells"], key=lambda cell: (cell["verdict"] != "fail", cell["verdict"] == "pass", -(cell["ratio"] or 0)))
print(f"verdict={result['verdict']}")
print(f"ratio={cells[0]['ratio'] if cells else ''}")
PYTHON
  if [ "${GATE_COMMENT:-false}" = true ] && [ -n "${GATE_PULL_REQUEST:-}" ]; then
    # The last comment is replaced, so that a pull request has one and not one for each push.
    gh pr comment "$GATE_PULL_REQUEST" --repo "$GITHUB_REPOSITORY" --edit-last --create-if-none --body-file "$folder/comment.md" ||
      echo "::warning::The comment could not be posted; does the job have 'pull-requests: write'?"
  fi
fi

case $code in
0) ;;
1) echo "::error::trainstep gate: head is slower, or its command fails. The summary has the figures." ;;
3)
  if [ "${GATE_CANNOT_TELL:-pass}" = pass ]; then
    echo "::warning::trainstep gate cannot tell: the summary says why, and what would help."
    code=0
  else
    echo "::error::trainstep gate cannot tell: the summary says why, and what would help."
  fi
  ;;
*) echo "::error::trainstep gate did not run; the line above says why." ;;
esac
exit "$code"
