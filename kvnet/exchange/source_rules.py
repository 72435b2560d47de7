"""Which files never become part of a document: ignored, binary, or likely to hold a secret."""

import re
from fnmatch import fnmatchcase

# Folders and files that tools write and nobody reads: versions, caches, installed dependencies.
IGNORED_FOLDERS = frozenset({
    ".bzr", ".cache", ".direnv", ".eggs", ".git", ".gradle", ".hg", ".hypothesis", ".idea", ".import_linter_cache",
    ".ipynb_checkpoints", ".jj", ".mypy_cache", ".next", ".nox", ".pnpm-store", ".pytest_cache", ".ruff_cache", ".svn",
    ".terraform", ".tox", ".venv", ".vs", ".vscode", "__pycache__", "bower_components", "node_modules", "venv",
})  # fmt: skip
IGNORED_FILES = frozenset({".DS_Store", ".coverage", "Thumbs.db", "desktop.ini", ".git"})
IGNORED_PATTERNS = ("*.pyc", "*.pyo", "*.swp", "*~", ".#*", "#*#")

_EXAMPLE_ENDINGS = (".example", ".sample", ".template", ".dist")
_SECRET_NAMES = {
    "environment file": (".env", ".env.*", "*.env", ".envrc"),
    "private key file": (
        "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_*_sk", "*.key", "*.p12", "*.pfx", "*.p8", "*.ppk",
        "*.jks", "*.keystore", "*.kdbx", "*.seed", "*.kvns",
    ),
    "credentials file": (
        ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf", ".htpasswd", ".git-credentials", ".dockercfg",
        ".boto", ".s3cfg", "credentials", "credentials.*", "*credentials.json", "client_secret*.json", "kubeconfig",
        "service-account*.json", "service_account*.json", "secrets", "secrets.*", "secret.*", "*.secret", "*.secrets",
        "token", "token.txt", "token.json", "tokens.json", "*.token", "*.tfstate", "*.tfstate.backup", "*.tfvars",
    ),
}  # fmt: skip
_SECRET_PATHS = ("*.aws/credentials", "*.docker/config.json", "*.kube/config", "*.ssh/*", "*.gnupg/*")

# Forms that their issuers document, so that a hit is rarely a coincidence.
_SECRET_TEXTS = (
    # The first line of a key alone is what code that reads keys holds; a key goes on with (escaped) line ends, at
    # times a few header lines, and base64.
    (
        "private key",
        re.compile(
            r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\s|\\[nr])*"
            r"(?:[A-Za-z-]+: [^\n\\]*(?:\n|\\n)(?:\s|\\[nr])*){0,4}[A-Za-z0-9+/=]{16}"
        ),
    ),
    ("AWS access key", re.compile(r"\b(?:AKIA|ASIA)(?![A-Z0-9]{9}EXAMPLE)[A-Z0-9]{16}\b")),
    ("GitHub token", re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})")),
    ("GitLab token", re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}")),
    ("Slack token", re.compile(r"\bxox[abeprs]-[A-Za-z0-9-]{20,}")),
    ("Google API key", re.compile(r"\bAIza[A-Za-z0-9_-]{35}\b")),
    ("Stripe key", re.compile(r"\b[rs]k_live_[A-Za-z0-9]{20,}")),
    ("Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{34,}\b")),
    ("npm token", re.compile(r"\bnpm_[A-Za-z0-9]{36}\b")),
    ("PyPI token", re.compile(r"\bpypi-AgE[A-Za-z0-9_-]{50,}")),
    # The lookbehind gives a run of such characters one start only: the search stays linear.
    ("API key", re.compile(r"(?<![\w-])sk-(?=[\w-]*[A-Z])(?=[\w-]*[0-9])[A-Za-z0-9_-]{32,}", re.ASCII)),
)


def ignored_reason(name: str, *, is_folder: bool) -> str | None:
    """Why a folder or file of this name is left out where no version control says what belongs to the work."""
    if is_folder:
        return f"a {name} folder" if name in IGNORED_FOLDERS or name.endswith(".egg-info") else None
    if name in IGNORED_FILES or any(fnmatchcase(name, pattern) for pattern in IGNORED_PATTERNS):
        return "a file that a tool wrote"
    return None


def secret_name_reason(path: str) -> str | None:
    """Why a file of this path, parted by ``/``, is likely to hold a secret."""
    name = path.rpartition("/")[2].lower()
    if name.endswith((*_EXAMPLE_ENDINGS, ".pub")):
        return None
    for reason, patterns in _SECRET_NAMES.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            # Source code about tokens and secrets is not a secret by its name alone.
            if name.endswith((".py", ".md", ".rs", ".go", ".ts", ".js", ".c", ".h", ".java", ".rb", ".swift", ".html")):
                continue
            return f"likely secret: {reason}"
    if any(fnmatchcase(path.lower(), pattern) for pattern in _SECRET_PATHS):
        return "likely secret: credentials file"
    return None


def secret_text_reason(text: str) -> str | None:
    """Why this text is likely to hold a secret, with the line it stands on; the secret itself is never repeated."""
    for reason, pattern in _SECRET_TEXTS:
        if (match := pattern.search(text)) is not None:
            line = text.count("\n", 0, match.start()) + 1
            return f"likely secret: {reason} in line {line:,}"
    return None
