#pragma once

#include "chat/state.h"
#include "chat/tokens.h"

namespace tessera::data::chat {

// Each reads the tokens of an expression, and makes a closure of it. Throw Error, with the line,
// for what is wrong or not implemented.

/// a if b else c
Expression conditional(Tokens& tokens);
/// a, b, or one of them alone.
Expression tuple(Tokens& tokens);
/// a or b, which a loop's list may be: an "if" behind it is the loop's.
Expression disjunction(Tokens& tokens);
/// name(arguments) behind "|".
Expression filter(Tokens& tokens, Expression value);

}  // namespace tessera::data::chat
