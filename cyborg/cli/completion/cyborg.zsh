
_cyborg() {
    local at='' name='' option='' word longer values
    local -a found
    integer i
    for ((i = 2; i < CURRENT; i++)); do
        word=${words[i]}
        if [[ -n $option ]]; then
            option=''
        elif [[ $word == -* ]]; then
            (( ${+_cyborg_values[/$name $word]} )) && option=$word
        else
            longer="${at:+$at }$word"
            if (( ${+_cyborg_words[/$longer]} || ${+_cyborg_commands[/$longer]} )); then
                at=$longer
                name=${_cyborg_commands[/$at]}
            fi
        fi
    done
    word=${words[CURRENT]%%=*}
    if [[ -z $option && ${words[CURRENT]} == --*=* ]] && (( ${+_cyborg_values[/$name $word]} )); then
        option=$word
        compset -P '*='
    fi
    if [[ -n $option ]]; then
        values=${_cyborg_values[/$name $option]}
        if [[ -n $values ]]; then
            compadd -- ${=values}
        else
            _files
        fi
    elif [[ ${words[CURRENT]} == -* ]]; then
        for word in ${=_cyborg_options[/$name]}; do
            found+=("$word:${_cyborg_help[/$name $word]}")
        done
        _describe -o option found
    else
        for word in ${=_cyborg_words[/$at]}; do
            found+=("$word:${_cyborg_help[/$at $word]}")
        done
        _describe command found
    fi
}
if [[ ${funcstack[1]} == _cyborg ]]; then
    _cyborg "$@"
else
    compdef _cyborg cyborg
fi
