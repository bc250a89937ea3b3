// The tokens that llama.cpp makes of texts: tokens VOCABULARY.gguf TEXTS. TEXTS has a text after each NUL byte. Prints a
// line of ids for each. Built by make_tokens.py.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "llama.h"

int main(int argc, char ** argv) {
    if (argc != 3) return 2;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    llama_model * model = llama_model_load_from_file(argv[1], params);
    if (!model) return 1;
    const llama_vocab * vocab = llama_model_get_vocab(model);
    std::ifstream file(argv[2], std::ios::binary);
    std::string texts((std::istreambuf_iterator<char>(file)), {});
    for (size_t at = 1; at <= texts.size();) {
        size_t end = texts.find('\0', at);
        if (end == std::string::npos) end = texts.size();
        std::vector<llama_token> tokens(end - at + 16);
        int count = llama_tokenize(vocab, texts.data() + at, (int) (end - at), tokens.data(), (int) tokens.size(), false, true);
        if (count < 0) return 1;
        for (int i = 0; i < count; i++) printf(i ? " %d" : "%d", tokens[i]);
        printf("\n");
        at = end + 1;
    }
    return 0;
}
